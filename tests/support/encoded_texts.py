"""Records as the encoder leaves them, with the texts of their tokens."""

from align.schemas.config import TokenOptions
from align.schemas.rows import Record, Role
from align.stages.data.encode import Encoder
from align.stages.data.tokenizer import load_tokenizer
from support.read_rows import user

USER = user("hi")


def conversation(*completions, prompt=(USER,), **more):
    """A record of candidates without scores."""
    count = len(completions)
    return Record(0, 0, prompt, completions, (Role.CANDIDATE,) * count, (None,) * count, **more)


def encode(folder, *records, **options):
    """What the encoder makes of records under the tokenizer of a folder."""
    rules = TokenOptions(**options)
    return Encoder(load_tokenizer(folder, rules), rules).encode(records)


def encode_one(folder, record, **options):
    """The row of a record, and what is noted of it."""
    result = encode(folder, record, **options)
    assert not result.rejected, result.rejected
    (row,) = result.rows
    return row, result.notes


def texts_of(folder, record, **options):
    """The prompt and its completions as the texts of their tokens, and what is noted."""
    row, notes = encode_one(folder, record, **options)
    decode = load_tokenizer(folder, TokenOptions()).hf.decode
    return [decode(ids) for ids in (row.prompt, *row.completions)], notes


def refusal_of(folder, record, **options):
    """Why a record cannot be encoded."""
    result = encode(folder, record, **options)
    assert not result.rows
    (bad,) = result.rejected
    return bad
