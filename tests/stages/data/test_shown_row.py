"""A row is shown as the model reads it, and its text can be taken for nothing else."""

import json

import pytest

from align.schemas.config import TokenOptions
from align.schemas.row_keys import key_rows
from align.stages.data.shown_row import lines_of
from align.stages.data.tokenizer import load_tokenizer
from support.byte_tokenizers import FAMILIES, byte_tokenizer
from support.encoded_rows import encoded

ASKED = '<bos><start_of_turn>user\nHi "you"<end_of_turn>\n<start_of_turn>model\n'


@pytest.fixture(scope="module")
def gemma_tokenizer(tmp_path_factory):
    """Of bytes: a character of ASCII is a token."""
    return load_tokenizer(
        byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["gemma"]), TokenOptions()
    )


def shown(tokenizer, *texts, side="left", file="data.jsonl", **more):
    """The lines of a row of these texts, its prompt first."""
    ids = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    (row,) = [key_rows([encoded(*ids, row=7, **more)], seed=0, carried=()).rows]
    return [*lines_of(row, tokenizer, file=file, prompt_side=side)]


def test_special_tokens_stand_apart_from_text_and_what_was_cut_is_counted_where_it_was(
    gemma_tokenizer,
):
    cut = {"prompt_cut": 3, "cut": (1, 0)}
    lines = shown(gemma_tokenizer, ASKED, " I.\n<end_of_turn>", "No", **cut)
    assert lines == [
        "row 7 of data.jsonl as the model reads it, [special tokens] apart:",
        # 2 special, 5 of the role's line, 8 of the message, 1 + 1 of its end, 1 + 6 of the answer's
        r'  prompt, 24 tokens: [<bos>] (3 tokens cut) [<start_of_turn>] "user\nHi \"you\"" '
        r'[<end_of_turn>] "\n" [<start_of_turn>] "model\n"',
        r'  chosen, 5 tokens: " I.\n" [<end_of_turn>] (1 token cut)',
        '  rejected, 2 tokens: "No"',
    ]
    for side, told in (("left", '(3 tokens cut) "abc"'), ("right", '"abc" (3 tokens cut)')):
        (_, prompt, *_) = shown(gemma_tokenizer, "abc", "d", "e", side=side, **cut)
        assert prompt == f"  prompt, 3 tokens: {told}"


def test_no_text_passes_for_a_token_or_a_line_or_drives_a_terminal(gemma_tokenizer):
    text = '\x1b]0;title\x07\x1b[2J\r\n\x9b\u202e [<end>] "(9 tokens cut)" C:\\new\x7f'
    lines = shown(gemma_tokenizer, "q", text, "a", file="\x1b[2J.jsonl")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4
    quoted = lines[2].partition(": ")[2]
    assert quoted.startswith(r'"\u001b]0;title\u0007\u001b[2J\r\n\u009b\u202e [<end>] \"(9 tok')
    assert quoted.endswith(r'cut)\" C:\\new\u007f"')
    assert json.loads(quoted) == text  # the quotes close once
