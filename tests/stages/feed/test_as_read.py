"""What a stream makes of stored rows: every branch with its own tokens, log-probs and partners."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.schemas.batches import Cursor
from align.schemas.rows import Role
from align.stages.feed.conversions import ScoreRules
from support.shard_cache import PAIR, block_of, feed_of, opened, write_cache
from support.slow_reading import read_slowly

C, R, D, U, X, M = Role
LEVELS = 2
KINDS = ("paired", "labelled", "grouped", "imitated")
ALL = ScoreRules(pairs="all", threshold="median")


@pytest.fixture(scope="module")
def mixed_cache(tmp_path_factory):
    """Pairs, labels and groups of four with scores of 0 to 5, in 24 row groups."""
    shapes = (PAIR, (U, D, D), (X,) * 4)
    blocks = [block_of(8, seed=unit, levels=LEVELS, roles=shapes[unit % 3]) for unit in range(24)]
    for unit, block in enumerate(blocks):
        if unit % 3 != 1:
            draw = np.random.default_rng(unit)
            is_own = block.rows.roles != M
            block.rows.scores[is_own] = draw.integers(0, 6, is_own.sum())
    return write_cache(tmp_path_factory.mktemp("made") / "cache", blocks)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A branch in a batch, or as it should stand in one."""

    row_id: str
    prompt: tuple
    ids: tuple
    role: int
    logp: float
    token_logps: tuple
    score: float | None
    weight: float


def seen_in(micro):
    """Each tree of a micro-batch as its branches."""
    rows, index = [], 0
    for number, tree in enumerate(micro.trees):
        branches = []
        for ids in tree.branches:
            score = float(micro.scores[index])
            branches.append(
                Seen(
                    micro.row_ids[number],
                    tuple(tree.prompt.tolist()),
                    tuple(ids.tolist()),
                    int(micro.roles[index]),
                    float(micro.reference[index]),
                    tuple(micro.reference_tokens[index].tolist()),
                    None if np.isnan(score) else score,
                    float(micro.carried["weight"][number]),
                )
            )
            index += 1
        rows.append(tuple(branches))
    assert index == len(micro.roles) == len(micro.places)
    return rows


def stored_rows(cache):
    folder, manifest = cache
    for shard in manifest.shards:
        yield from pq.read_table(folder.data / shard.file).to_pylist()


def branch_of(row, place, role, score, context=()):
    return Seen(
        row["row_id"],
        (*row["prompt_ids"], *context),
        tuple(row["completion_ids"][place]),
        role,
        row["ref_logp"][place],
        tuple(row["ref_token_logps"][place]),
        score,
        row["weight"],
    )


def expected_rows(cache, kind, rules):
    """Every row that is read: its own branches, and the mismatches of each level."""
    for row in stored_rows(cache):
        count = len(row["role"]) // (1 + LEVELS)
        own = list(zip(row["role"][:count], row["score"][:count], strict=True))
        for made in read_slowly(own, kind, rules):
            branches = [branch_of(row, *branch) for branch in made]
            others = [
                [branch_of(row, place + count * level, M, None) for place, _, _ in made]
                for level in range(1, LEVELS + 1)
            ]
            yield tuple(branches), [tuple(level) for level in others]


def steps_of(source, *, world=1, **changed):
    """Each step as the batches of all ranks."""
    shares = []
    for rank in range(world):
        with feed_of(source, rank=rank, world=world, **changed).steps(Cursor(0, 0)) as steps:
            shares.append(list(steps))
    return list(zip(*shares, strict=True))


@pytest.mark.parametrize("rules", [ScoreRules(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_branch_comes_with_what_was_stored_of_it(mixed_cache, kind, rules):
    source = opened(mixed_cache, kind=kind, rules=rules)
    expected = list(expected_rows(mixed_cache, kind, rules))
    own, others = [], []
    for step in steps_of(source, world=2):
        for batch in step:
            own += [row for micro in batch.own for row in seen_in(micro)]
            others += [row for micro in batch.mismatched for row in seen_in(micro)]
    assert sorted(own, key=str) == sorted((row for row, _ in expected), key=str)
    assert sorted(others, key=str) == sorted((levels[0] for _, levels in expected), key=str)
    assert len(own) == source.train_rows


@pytest.mark.parametrize("kind", KINDS)
def test_counts_and_budget_are_those_of_the_branches_that_are_run(mixed_cache, kind):
    source = opened(mixed_cache, kind=kind, rules=ALL)
    for step in steps_of(source, world=3, tokens_per_batch=60, batch_size=20):
        rows = [row for batch in step for micro in batch.own for row in seen_in(micro)]
        branches = [branch for row in rows for branch in row]
        good = [len(branch.ids) for branch in branches if branch.role in {C, D}]
        for batch in step:
            assert (batch.rows, batch.branches) == (len(rows), len(branches))
            assert batch.tokens == sum(len(branch.ids) for branch in branches)
            assert batch.chosen_tokens == sum(good)
            for micro in batch.own + batch.mismatched:
                sizes = [tree.num_tokens for tree in micro.trees]
                assert sum(sizes) <= 60 or len(sizes) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_steps_are_the_same_for_any_world_and_budget(mixed_cache, kind, world):
    source = opened(mixed_cache, kind=kind, rules=ALL)
    alone = steps_of(source, batch_size=17, tokens_per_batch=10**6)
    dealt = steps_of(source, batch_size=17, tokens_per_batch=80, world=world)
    for one, many in zip(alone, dealt, strict=True):
        assert in_order(one, "own") == in_order(many, "own")
        assert in_order(one, "mismatched") == in_order(many, "mismatched")


def in_order(step, side):
    """Every branch of a step by its place."""
    placed = {}
    for batch in step:
        for micro in getattr(batch, side):
            branches = [branch for row in seen_in(micro) for branch in row]
            placed |= dict(zip(micro.places.tolist(), branches, strict=True))
    return [placed[place] for place in range(len(placed))]


def test_a_context_stands_between_the_prompt_and_each_completion(mixed_cache):
    context = {D: (1001, 1002), U: (1003,)}
    source = opened(mixed_cache, kind="labelled", mismatched=False, context=context)
    expected = [
        branch_of(row, place, role, score, context[role])
        for row in stored_rows(mixed_cache)
        for own in [list(zip(row["role"], row["score"], strict=True))[: len(row["role"]) // 3]]
        for made_row in read_slowly(own, "labelled", ScoreRules())
        for place, role, score in made_row
    ]
    found = []
    for step in steps_of(source, tokens_per_batch=50):
        for micro in step[0].own:
            sizes = [tree.num_tokens for tree in micro.trees]
            assert sum(sizes) <= 50 or len(sizes) == 1
            rows = seen_in(micro)
            assert all(len(row) == 1 for row in rows)
            found += [row[0] for row in rows]
    assert sorted(found, key=str) == sorted(expected, key=str)
