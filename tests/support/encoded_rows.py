"""Rows of token ids made by hand or by chance, and rings of them; read back as plain Python."""

from collections import Counter
from typing import NamedTuple

from hypothesis import strategies as st

from align.schemas.row_keys import EncodedRecord, key_rows
from align.schemas.rows import Record, Role
from align.stages.pairing.long_form import merge_same_prompts
from align.stages.pairing.ring import Ring, complete_ring, write_range
from align.stages.sort.key_ranges import (
    PartitionedRows,
    sorted_partition,
    with_copies_numbered,
    write_partitions,
)
from align.stages.storage.cache.spool import Spool, new_part, put_commit


class Plain(NamedTuple):
    """A row as nothing but Python values."""

    row_id: bytes
    copy: int
    source: tuple
    prompt: tuple
    prompt_cut: int
    branches: tuple  # (completion, role, score, cut) each
    turns: tuple  # of each branch
    carried: tuple
    place: int
    prompt_keys: tuple
    completion_keys: tuple


def encoded(prompt, *completions, row=0, file=0, roles=None, scores=None, cut=None, **more):
    """An encoded record; of its texts only that of the prompt matters any more."""
    roles = roles or (Role.CHOSEN, Role.REJECTED, *(Role.CANDIDATE,) * 9)[: len(completions)]
    record = Record(
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
    return EncodedRecord(record, list(prompt), more.get("prompt_cut", 0), own, cut, turns)


def plain(keyed):
    """Every row of some KeyedRows, one at a time."""
    rows = keyed.rows
    ids = rows.row_id.tobytes()
    result = []
    for index in range(len(rows)):
        own = range(int(rows.branch_offsets[index]), int(rows.branch_offsets[index + 1]))
        scores = [None if s != s else float(s) for s in (rows.scores[b] for b in own)]  # noqa: PLR0124
        branches = [
            (tuple(rows.completions[b].tolist()), int(rows.roles[b]), score, int(rows.cut[b]))
            for b, score in zip(own, scores, strict=True)
        ]
        result.append(
            Plain(
                row_id=ids[16 * index : 16 * index + 16],
                copy=int(rows.copy[index]),
                source=(int(rows.file[index]), int(rows.row[index])),
                prompt=tuple(rows.prompts[index].tolist()),
                prompt_cut=int(rows.prompt_cut[index]),
                branches=tuple(branches),
                turns=tuple(tuple(rows.whole("turns")[b].tolist()) for b in own),
                carried=tuple(float(column[index]) for column in rows.carried.values()),
                place=int(keyed.ring_keys[index]),
                prompt_keys=(
                    rows.prompt_keys.prompt[index : index + 1].tobytes(),
                    int(rows.prompt_keys.split[index]),
                ),
                completion_keys=tuple(int(keyed.completion_keys[b]) for b in own),
            )
        )
    return result


def make_ring(
    folder, records, *, chunk=1000, seed=0, carried=(), per_file=None, ranges=1, **options
):
    """The ring of these records, which arrive in chunks of so many; and what was noticed."""
    per_file = per_file or len(records)
    files = [records[start : start + per_file] for start in range(0, len(records), per_file)]
    encoded_files = []
    for number, rows in enumerate(files):
        pieces = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
        chunks = [key_rows(piece, seed=seed, carried=carried) for piece in pieces]
        encoded_files.append(write_encoded(folder, number, chunks, ranges))
    return ring_of_files(folder, encoded_files, ranges, **options)


def write_encoded(folder, number, chunks, ranges=1):
    """The partitions of some encoded rows."""
    spool = Spool(folder)
    spool.root.mkdir(parents=True, exist_ok=True)
    spool.prepare()
    commit = spool.encoded(number)
    with new_part(commit) as file:
        directory = write_partitions(file, chunks, ranges)
    path = commit.with_name(file.file.name)
    return PartitionedRows(path, directory, ranges, first_row=0, file_start=0)


def ring_of_files(folder, files, ranges=1, *, num_pairs=0, long_form=False, side="left"):
    """The complete ring of encoded files, and what was noticed."""
    spool = Spool(folder)
    for number in range(ranges):
        notes = Counter()
        with new_part(spool.arranged(number)) as file:
            rows = sorted_partition(files, number)
            if rows and long_form:
                rows = merge_same_prompts(rows, notes, prompt_side=side)
            if rows:
                rows = with_copies_numbered(rows, notes)
            record = write_range(file, rows, notes)
        put_commit(spool.arranged(number), record)
    complete_ring(Ring(spool, num_pairs), ranges)
    ring = Ring(spool, num_pairs)
    return ring, Counter(ring.record.notes)


def all_rows(ring):
    """The whole ring as plain rows."""
    return plain(ring.rows.read(0, len(ring.rows)))


def token_lists(*, most=6, alphabet=4):
    """Short lists over few tokens: equal ones are common."""
    return st.lists(st.integers(1, alphabet), min_size=1, max_size=most)


@st.composite
def record_lists(draw, *, largest=30, prompts=8, alphabet=4, with_scores=False):
    """Records with few different prompts, some of them equal; `row` numbers them."""
    pool = draw(st.lists(token_lists(alphabet=alphabet), min_size=1, max_size=prompts))
    count = draw(st.integers(1, largest))
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
