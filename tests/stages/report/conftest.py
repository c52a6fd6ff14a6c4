"""Caches whose every number is chosen by hand, written the way stage 1 writes them."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest

from align.schemas.cache import FORMAT_VERSION, InputEntry, Plan
from align.schemas.row_keys import key_rows
from align.schemas.rows import Role, ScoredBlock
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.commits import UnitFacts, commit_unit
from align.stages.storage.manifest_file import build_manifest, write_manifest
from support.encoded_rows import encoded

PLAN_KEY = "ab" * 32


class Branch(NamedTuple):
    role: Role
    ids: list[int]
    logp: float
    cut: int = 0
    score: float | None = None


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    branches: list[Branch]
    prompt_cut: int = 0
    carried: dict[str, float] = field(default_factory=dict)


def block_of(rows, first):
    """The rows with their log-probs; the id of each is its number."""
    records = [
        encoded(
            row.prompt,
            *(branch.ids for branch in row.branches),
            row=number,
            roles=[branch.role for branch in row.branches],
            scores=[branch.score for branch in row.branches],
            cut=[branch.cut for branch in row.branches],
            prompt_cut=row.prompt_cut,
            carried=row.carried,
        )
        for number, row in enumerate(rows, first)
    ]
    block = key_rows(records, seed=0, carried=[*rows[0].carried]).rows
    ids = np.array([f"{number:016d}" for number in block.row], dtype="S16")
    logps = np.array([branch.logp for row in rows for branch in row.branches])
    return ScoredBlock(replace(block, row_id=ids), logps, None)


def write_cache(root, rows, *, per_unit=2):
    """Cuts the rows into units, one shard each."""
    folder = CacheFolder(root)
    folder.prepare()
    work = folder.work(PLAN_KEY)
    work.prepare()
    commits = {}
    for unit, start in enumerate(range(0, len(rows), per_unit)):
        block = block_of(rows[start : start + per_unit], start)
        facts = UnitFacts("00", "ff", 64, (), {}, {"path": "exact"}, {0: "pairs.jsonl"})
        commits[unit] = commit_unit(work, "run", unit, block, facts)
    ends = [min(len(rows), per_unit * unit) for unit in range(len(commits) + 1)]
    write_manifest(folder, build_manifest(plan_of(ends, rows_in=len(rows) + 3), commits))
    return folder


def plan_of(unit_offsets, *, rows_in):
    return Plan(
        digest="",
        format_version=FORMAT_VERSION,
        plan_key=PLAN_KEY,
        fingerprint={
            "model.dtype": "float32",
            "tokens.max_length": "16",
            "tokenizer.stop.turn": "7 template <|user|>",
            "tokenizer.stop.tool_calls": "8 template <|observation|>",
            "tokenizer.stop.text": "2 tokenizer </s>",
        },
        reference_key="cd" * 32,
        model="models/tiny",
        adapter="",
        inputs=(InputEntry("pairs.jsonl", 1234, "ef" * 32, rows_in),),
        rows_in=rows_in,
        unit_offsets=tuple(unit_offsets),
        quarantine=(),
        quarantined={"empty_completion": 1, "too_long": 2},
        notes={"rows_with_prompt_truncated": 1},
        reuse=(),
        threads=1,
    )


def pair(prompt, chosen, rejected, *, prompt_cut=0, rejected_cut=0, mismatched=0):
    """A pair; mismatch k of a completion has its ids + 100 k and its log-prob - 100 k."""
    own = [Branch(Role.CHOSEN, *chosen), Branch(Role.REJECTED, *rejected, cut=rejected_cut)]
    others = [
        Branch(Role.MISMATCHED, [i + 100 * k for i in branch.ids], branch.logp - 100 * k)
        for k in range(1, mismatched + 1)
        for branch in own
    ]
    return Row(prompt, own + others, prompt_cut)


def four_pairs(mismatched):
    return [
        pair([1, 2, 3], ([4, 5, 6, 7], -4.0), ([8, 9], -6.0), mismatched=mismatched),
        pair([1], ([2, 3], -8.0), ([4, 5, 6, 7], -4.0), mismatched=mismatched),
        pair(
            [1, 2],
            ([9, 9, 9], -6.0),
            ([8], -3.0),
            prompt_cut=5,
            rejected_cut=2,
            mismatched=mismatched,
        ),
        pair([1, 2, 3, 4, 5], ([1], -1.0), ([2], -2.0), mismatched=mismatched),
    ]


@pytest.fixture
def paired(tmp_path):
    """Four pairs, one mismatch for each completion."""
    return write_cache(tmp_path / "pairs", four_pairs(1))


@pytest.fixture
def twice_mismatched(tmp_path):
    """The same pairs, two mismatches for each completion."""
    return write_cache(tmp_path / "twice", four_pairs(2))


@pytest.fixture
def cut_most(tmp_path):
    """Two rows that lost as many tokens as a shard can say."""
    most = 2**31 - 1
    row = pair([1], ([2], -1.0), ([3], -1.0), prompt_cut=most, rejected_cut=most)
    return write_cache(tmp_path / "cut", [row, row])


@pytest.fixture
def unpaired(tmp_path):
    """One desirable and three undesirable completions."""
    roles = [Role.DESIRABLE, Role.UNDESIRABLE, Role.UNDESIRABLE, Role.UNDESIRABLE]
    rows = [
        Row(
            [number],
            [
                Branch(role, [number, number], -1.0 - number),
                Branch(Role.MISMATCHED, [50 + number], -60.0 - number),
            ],
            carried={"weight": number / 2},
        )
        for number, role in enumerate(roles)
    ]
    return write_cache(tmp_path / "labels", rows)


@pytest.fixture
def scored(tmp_path):
    """A group of two, one score unknown, and a group of one."""
    first = [
        Branch(Role.CANDIDATE, [2, 3], -2.0, score=0.5),
        Branch(Role.CANDIDATE, [4], -1.0),
        Branch(Role.MISMATCHED, [7], -9.0),
        Branch(Role.MISMATCHED, [2, 3], -8.0),
    ]
    second = [Branch(Role.CANDIDATE, [7], -3.0, score=1.0), Branch(Role.MISMATCHED, [4], -7.0)]
    return write_cache(tmp_path / "scores", [Row([1], first), Row([6], second)])


@pytest.fixture
def misshapen(tmp_path):
    """A row with two chosen completions and nothing else."""
    two = [Branch(Role.CHOSEN, [1], -1.0), Branch(Role.CHOSEN, [2], -1.0)]
    return write_cache(tmp_path / "misshapen", [Row([1], two)])


@pytest.fixture
def pair_and_label(tmp_path):
    """Rows of two kinds, in a shard each."""
    labelled = [Branch(Role.DESIRABLE, [1], -1.0), Branch(Role.MISMATCHED, [2], -2.0)]
    return write_cache(tmp_path / "both", [*four_pairs(1)[:1], Row([1], labelled)], per_unit=1)
