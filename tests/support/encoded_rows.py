"""Rows of token ids made by hand or by chance, by key range; read back as plain Python."""

from collections import Counter
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from align.schemas.rows import Role, TextRow
from align.stages.data.row_keys import EncodedRow, key_rows
from align.stages.pairing.partition import ShardReader, SliceFile, write_slice
from align.stages.pairing.shard_rows import build_shard


class Plain(NamedTuple):
    """A row as nothing but Python values."""

    row_id: bytes
    copy: int
    source: tuple
    prompt: tuple
    prompt_cut: int
    completions: tuple  # (completion, role, score, cut) each
    turns: tuple  # of each completion
    carried: tuple
    place: int
    prompt_keys: tuple
    completion_keys: tuple


def encoded(prompt, *completions, row=0, file=0, roles=None, scores=None, cut=None, **more):
    """An encoded row; of its texts only that of the prompt matters any more."""
    roles = roles or (Role.CHOSEN, Role.REJECTED, *(Role.CANDIDATE,) * 9)[: len(completions)]
    record = TextRow(
        file=file,
        row=row,
        prompt=more.get("text", repr(list(prompt))),
        completions=("",) * len(completions),
        roles=tuple(roles),
        scores=tuple(scores or (None,) * len(completions)),
        carried=more.get("carried", {}),
    )
    cut = tuple(cut or (0,) * len(completions))
    own = tuple(map(list, completions))
    turns = more.get("turns", (None,) * len(own))
    return EncodedRow(record, list(prompt), more.get("prompt_cut", 0), own, cut, turns)


def plain(rows):
    """Every row of some, one at a time."""
    result = []
    has_keys = "completion_key" in rows.of_completions.schema.names
    for index, row_id in enumerate(rows.ids()):
        digest, _, copy = row_id.partition("-")
        own = range(int(rows.completion_offsets[index]), int(rows.completion_offsets[index + 1]))
        scores = [None if s != s else float(s) for s in (rows.scores[b] for b in own)]  # noqa: PLR0124
        completions = [
            (tuple(rows.completions[b].tolist()), int(rows.roles[b]), score, int(rows.cut[b]))
            for b, score in zip(own, scores, strict=True)
        ]
        turns = [(1,) * len(ids) for ids, *_ in completions]
        if rows.learned is not None:
            turns = [tuple(rows.learned[b].tolist()) for b in own]
        result.append(
            Plain(
                row_id=bytes.fromhex(digest),
                copy=int(copy or 0),
                source=(int(rows.file[index]), int(rows.row[index])),
                prompt=tuple(rows.prompts[index].tolist()),
                prompt_cut=int(rows.prompt_cut[index]),
                completions=tuple(completions),
                turns=tuple(turns),
                carried=tuple(float(column[index]) for column in rows.carried.values()),
                place=int(rows.range_keys[index]),
                prompt_keys=(
                    rows.prompt_key[index : index + 1].tobytes(),
                    int(rows.split_key[index]),
                ),
                completion_keys=tuple(int(rows.completion_key[b]) for b in own) if has_keys else (),
            )
        )
    return result


class Shards:
    """Encoded rows by key range; `notes` are those of reading all of them."""

    def __init__(self, folder, files, ranges=1, *, shards=None, num_pairs=0, joins=None):
        """`files` are chunks of rows each; with `joins`, a side, rows of one prompt are joined."""
        self.count, self.num_pairs, self.notes = shards or ranges, num_pairs, Counter()
        slices = []
        for number, chunks in enumerate(files):
            path = folder / f"{number}.arrow"
            with path.open("wb") as sink:
                facts = write_slice(sink, chunks, ranges)
            counts = np.array(facts["counts"], np.int32).reshape(-1, ranges)
            slices.append(SliceFile(path, counts, first_row=0))
        self.rows = ShardReader(slices, self.count, joins)

    def read(self):
        """The rows of each shard that has some."""
        found = [self.rows.read(shard, self.notes) for shard in range(self.count)]
        return [keyed for keyed in found if keyed]

    def all_rows(self):
        """All rows, one at a time."""
        return [row for keyed in self.read() for row in plain(keyed)]

    def build(self, shard=0, *, max_length=10**6, stops=frozenset()):
        """A shard with its partners."""
        rule = {"max_length": max_length, "stops": frozenset(stops)}
        return build_shard(self.rows.read, shard, self.count, self.num_pairs, **rule)


def shards_of(folder, records, *, chunk=1000, carried=(), per_file=None, **options):
    """These records by key range; they arrive in chunks of so many, and slices of so many."""
    per_file = per_file or len(records)
    slices = [records[start : start + per_file] for start in range(0, len(records), per_file)]
    chunked = [
        [
            key_rows(rows[start : start + chunk], carried=carried)
            for start in range(0, len(rows), chunk)
        ]
        for rows in slices
    ]
    return Shards(folder, chunked, **options)


def plain_of(shard):
    """The rows of a built shard, one at a time."""
    return [row._replace(place=None, completion_keys=None) for row in plain(shard.rows)]


def token_lists(*, most=6, alphabet=4):
    """Short lists over few tokens: equal ones are common."""
    return st.lists(st.integers(1, alphabet), min_size=1, max_size=most)


@st.composite
def record_lists(draw, *, prompts=8, alphabet=4, with_scores=False):
    """Records with few different prompts, some of them equal; `row` numbers them."""
    pool = draw(st.lists(token_lists(alphabet=alphabet), min_size=1, max_size=prompts))
    count = draw(st.integers(1, 30))
    records = []
    for row in range(count):
        completions = draw(st.lists(token_lists(alphabet=alphabet), min_size=1, max_size=3))
        scores = [draw(st.sampled_from([0.0, 0.5, -1.0])) for _ in completions]
        records.append(
            encoded(
                draw(st.sampled_from(pool)),
                *completions,
                row=row,
                roles=[Role.CANDIDATE] * len(completions),
                scores=scores if with_scores else None,
                cut=list(map(len, completions)),
                carried={"weight": draw(st.sampled_from([1.0, 2.0]))},
            )
        )
    return records
