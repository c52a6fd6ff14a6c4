"""Caches whose every number is chosen by hand, written the way stage 1 writes them."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest

from align.schemas.rows import Role
from align.stages.data.row_keys import key_rows
from support.encoded_rows import encoded
from support.made_caches import commit_blocks, plan_of


class Completion(NamedTuple):
    role: Role
    ids: list[int]
    logp: float
    cut: int = 0
    score: float | None = None


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    completions: list[Completion]
    prompt_cut: int = 0
    carried: dict[str, float] = field(default_factory=dict)


def block_of(rows, first):
    """The rows with their log-probs; the id of each is its number."""
    records = [
        encoded(
            row.prompt,
            *(completion.ids for completion in row.completions),
            row=number,
            roles=[completion.role for completion in row.completions],
            scores=[completion.score for completion in row.completions],
            cut=[completion.cut for completion in row.completions],
            prompt_cut=row.prompt_cut,
            carried=row.carried,
        )
        for number, row in enumerate(rows, first)
    ]
    block = key_rows(records, carried=[*rows[0].carried])
    ids = [f"{number:016d}".encode().hex() for number in block.row.tolist()]
    logps = np.array([completion.logp for row in rows for completion in row.completions])
    return block.with_columns(row_id=ids, ref_logp=logps).without("completion_key")


def write_cache(root, rows, *, per_unit):
    """Cuts the rows into units, one shard each."""
    starts = range(0, len(rows), per_unit)
    blocks = [block_of(rows[start : start + per_unit], start) for start in starts]
    folder, commits = commit_blocks(root, blocks)
    plan = replace(
        plan_of(starts),
        fingerprint={"tokenizer.stop.turn": "7 template <|user|>"},
        rows_in=len(rows) + 3,
        shards=tuple(len(block) for block in blocks),
        reasons={"empty_completion": 1, "too_long": 2},
    )
    folder.finish(folder.build_manifest(plan, dict(enumerate(commits))))
    return folder


def pair(prompt, chosen, rejected, *, prompt_cut=0, rejected_cut=0):
    """A pair; mismatch k = 1, 2 of a completion has its ids + 100 k and its log-prob - 100 k."""
    own = [Completion(Role.CHOSEN, *chosen), Completion(Role.REJECTED, *rejected, cut=rejected_cut)]
    others = [
        Completion(
            Role.MISMATCHED, [i + 100 * k for i in completion.ids], completion.logp - 100 * k
        )
        for k in (1, 2)
        for completion in own
    ]
    return Row(prompt, own + others, prompt_cut)


PAIRS = [
    pair([1, 2, 3], ([4, 5, 6, 7], -4.0), ([8, 9], -6.0)),
    pair([1], ([2, 3], -8.0), ([4, 5, 6, 7], -4.0)),
    pair([1, 2], ([9, 9, 9], -6.0), ([8], -3.0), prompt_cut=5, rejected_cut=2),
    pair([1, 2, 3, 4, 5], ([1], -1.0), ([2], -2.0)),
]


def labelled(number, role):
    """One completion and a mismatched one, with a weight."""
    other = Completion(Role.MISMATCHED, [50 + number], -60.0 - number)
    own = Completion(role, [number, number], -1.0 - number)
    return Row([number], [own, other], carried={"weight": number / 2})


GROUPS = [  # of two, one score unknown, and of one
    Row(
        [1],
        [
            Completion(Role.CANDIDATE, [2, 3], -2.0, score=0.5),
            Completion(Role.CANDIDATE, [4], -1.0),
            Completion(Role.MISMATCHED, [7], -9.0),
            Completion(Role.MISMATCHED, [2, 3], -8.0),
        ],
    ),
    Row(
        [6], [Completion(Role.CANDIDATE, [7], -3.0, 0, 1.0), Completion(Role.MISMATCHED, [4], -7.0)]
    ),
]
CACHES = {
    "paired": PAIRS,
    "unpaired": [labelled(0, Role.DESIRABLE), *(labelled(n, Role.UNDESIRABLE) for n in (1, 2, 3))],
    "scored": GROUPS,
    "two chosen": [Row([1], [Completion(Role.CHOSEN, [number], -1.0) for number in (1, 2)])],
}


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    """The folder of each cache."""
    root = tmp_path_factory.mktemp("caches")
    return {name: write_cache(root / name, rows, per_unit=2) for name, rows in CACHES.items()}
