"""What a feed yields, in any world and from any step; how it ends, and what it holds at most."""

import threading
import tracemalloc
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import AlignError, CorruptionError
from align.schemas.rows import Role
from align.stages.feed.cache_index import unchecked
from align.stages.feed.epoch_order import ROW_GROUPS_PER_WINDOW, shuffled_order
from align.stages.feed.select import ScoreRules
from align.stages.storage.cache import Cache
from align.stages.storage.shards import read_shard
from support.refusals import refuses
from support.shard_cache import PAIR, block_of, feed_of, opened, write_cache
from support.slow_reading import read_slowly

C, R, D, U, X, M = Role
LEVELS = 2
PLAIN, ALL = ScoreRules(), ScoreRules(pairs="all", threshold="median")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Pairs, labels and groups of four with scores of 0 to 5, in 24 row groups."""
    shapes = (PAIR, (U, D, D), (X,) * 4)
    blocks = [block_of(5, seed=unit, levels=LEVELS, roles=shapes[unit % 3]) for unit in range(24)]
    for unit, block in enumerate(blocks):
        if unit % 3 != 1:
            draw = np.random.default_rng(unit)
            is_own, scores = block.roles != M, block.scores.copy()
            scores[is_own] = draw.integers(0, 6, is_own.sum())
            blocks[unit] = block.with_columns(score=scores)
    return write_cache(tmp_path_factory.mktemp("made") / "cache", blocks)


def seen_in(micro):
    """Each tree of a micro-batch as its completions."""
    rows, index = [], 0
    for number, tree in enumerate(micro.trees):
        completions = []
        for ids in tree.branches:
            score = float(micro.block.scores[index])
            completions.append(
                (
                    micro.row_ids[number],
                    tree.prompt.tolist(),
                    ids.tolist(),
                    int(micro.block.roles[index]),
                    float(micro.block.logps[index]),
                    micro.block.token_logps[index].tolist(),
                    None if np.isnan(score) else score,
                    float(micro.block.carried["weight"][number]),
                )
            )
            index += 1
        rows.append(completions)
    assert index == len(micro.block.roles) == len(micro.step_indices)
    return rows


def stored_rows(cache):
    folder, manifest = cache
    for shard in manifest.shards:
        yield from pq.read_table(folder.data / shard.file).to_pylist()


def completion_of(row, place, role, score=None, context=()):
    return (
        row["row_id"],
        [*row["prompt_ids"], *context],
        row["completion_ids"][place],
        role,
        row["ref_logp"][place],
        row["ref_token_logps"][place],
        score,
        row["weight"],
    )


def expected_rows(cache, kind, rules, context=None):
    """Every row that is read: its own completions, and the mismatches of each level."""
    for row in stored_rows(cache):
        count = len(row["role"]) // (1 + LEVELS)
        own = list(zip(row["role"][:count], row["score"][:count], strict=True))
        for made in read_slowly(own, kind, rules):
            yield (
                [
                    completion_of(row, *completion, (context or {}).get(completion[1], ()))
                    for completion in made
                ],
                [
                    [completion_of(row, place + count * level, M) for place, _, _ in made]
                    for level in range(1, LEVELS + 1)
                ],
            )


def steps_of(source, *, world=1, **changed):
    """Each step as the batches of all ranks."""
    shares = []
    for rank in range(world):
        with feed_of(source, rank=rank, world=world, **changed).steps(0) as steps:
            shares.append(list(steps))
    return list(zip(*shares, strict=True))


def rows_in(steps, side="own"):
    """All trees of these steps, in any order."""
    batches = [batch for step in steps for batch in step]
    micros = [micro for batch in batches for micro in getattr(batch, side)]
    return sorted((row for micro in micros for row in seen_in(micro)), key=str)


def in_order(step, side="own"):
    """Every completion of a step by its place."""
    placed = {}
    for batch in step:
        for micro in getattr(batch, side):
            completions = [completion for row in seen_in(micro) for completion in row]
            placed |= dict(zip(micro.step_indices.tolist(), completions, strict=True))
    return [placed[place] for place in range(len(placed))]


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("paired", ALL),
        ("labelled", PLAIN),
        ("labelled", ALL),
        ("grouped", PLAIN),
        ("imitated", ALL),
    ],
)
def test_every_completion_comes_with_what_was_stored_of_it_in_every_epoch(mixed, kind, rules):
    source = opened(mixed, kind=kind, rules=rules)
    expected = list(expected_rows(mixed, kind, rules))
    assert source.train_rows == len(expected) > 0
    steps = steps_of(source, world=2, epochs=2)
    for epoch in range(2):
        here = steps[len(steps) // 2 * epoch :][: len(steps) // 2]
        assert rows_in(here) == sorted((row for row, _ in expected), key=str)
        others = sorted((levels[epoch] for _, levels in expected), key=str)
        assert rows_in(here, "mismatched") == others


@pytest.mark.parametrize(
    ("kind", "world", "batch_size", "budget"),
    [
        ("paired", 2, 17, 60),
        ("labelled", 3, 90, 80),
        ("grouped", 8, 6, 1),
        ("imitated", 4, 8, 999),
    ],
)
def test_steps_are_the_same_for_any_world_and_budget(mixed, kind, world, batch_size, budget):
    source = opened(mixed, kind=kind, rules=ALL)
    changed = {"batch_size": batch_size, "kl_per_step": 7}
    alone = steps_of(source, **changed, tokens_per_batch=10**6)
    dealt = steps_of(source, **changed, tokens_per_batch=budget, world=world)
    for one, many in zip(alone, dealt, strict=True):
        completions = in_order(one)
        assert completions == in_order(many)
        assert in_order(one, "mismatched") == in_order(many, "mismatched")
        for batch in many:
            assert batch.rows == sum(len(micro.trees) for each in many for micro in each.own)
            most = min(7, len(completions))
            assert (batch.completions, batch.mismatched_completions) == (len(completions), most)
            assert batch.tokens == sum(len(completion[2]) for completion in completions)
            good = [len(completion[2]) for completion in completions if completion[3] in {C, D}]
            assert batch.chosen_tokens == sum(good)
        for side in ("own", "mismatched"):
            passes = [getattr(batch, side) for batch in many]
            assert len({len(micros) for micros in passes}) == 1
            for micro in (micro for micros in passes for micro in micros):
                sizes = [tree.num_tokens for tree in micro.trees]
                assert sum(sizes) <= budget or len(sizes) == 1
                assert set(micro.block.carried) == {"weight"}  # also of a rank with nothing to do
                assert micro.block.token_logps is not None


def test_a_context_stands_between_the_prompt_and_each_completion(mixed):
    context = {D: (1001, 1002), U: (1003,)}
    source = opened(mixed, kind="labelled", mismatched=False, context=context)
    steps = steps_of(source, tokens_per_batch=50)
    expected = expected_rows(mixed, "labelled", PLAIN, context)
    assert rows_in(steps) == sorted(
        ([completion] for row, _ in expected for completion in row), key=str
    )
    for step in steps:
        assert step[0].mismatched == ()
        for micro in step[0].own:
            sizes = [tree.num_tokens for tree in micro.trees]
            assert sum(sizes) <= 50 or len(sizes) == 1


def test_a_feed_resumes_from_any_step(mixed):
    """Of an epoch and over its edge, and now and then from there to the end."""

    def content(batches):
        micros = [(batch, micro) for batch in batches for micro in (*batch.own, *batch.mismatched)]
        return [(one.rows, seen_in(m), m.step_indices.tolist()) for one, m in micros]

    feed = feed_of(opened(mixed), batch_size=5, epochs=2, world=3, rank=1)
    with feed.steps(0) as steps:
        whole = list(steps)
    per_epoch = feed.steps_per_epoch
    assert len(whole) == 2 * per_epoch > 30
    for done in (*range(0, per_epoch, 3), *range(per_epoch - 1, per_epoch + 3)):
        last = None if done % 8 == 0 else 2
        with feed.steps(done) as steps:
            rest = list(steps) if last is None else [next(steps), next(steps)]
        assert content(rest) == content(whole[done:][:last])
    with feed.steps(2 * per_epoch) as steps:
        assert list(steps) == []


def test_held_out_rows_are_met_in_one_order_and_never_trained_on(mixed):
    source = opened(mixed, eval_fraction=0.3)
    passes = []
    for _ in range(2):
        shares = []
        for rank in range(3):
            with feed_of(source, rank=rank, world=3).held_out() as steps:
                shares.append(list(steps))
        completions = [one for step in zip(*shares, strict=True) for one in in_order(step)]
        passes.append(list(dict.fromkeys(completion[0] for completion in completions)))
    trained = {row[0][0] for row in rows_in(steps_of(source))}
    readable = [own[0][0] for own, _ in expected_rows(mixed, "labelled", PLAIN)]
    assert passes[0] == passes[1] == [row for row in readable if row not in trained]
    assert len(passes[0]) == source.eval_rows > 20
    assert not feed_of(opened(mixed)).eval_rows


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name.startswith("align-prefetch")]


@pytest.fixture
def forty_units(tmp_path):
    blocks = [block_of(20, seed=seed) for seed in range(40)]
    return write_cache(tmp_path / "cache", blocks)


@pytest.mark.parametrize("check", [Cache.check, unchecked])
def test_damage_done_while_training_stops_it_and_names_the_unit(forty_units, check):
    source = opened(forty_units, check=check)
    folder, manifest = forty_units
    order = shuffled_order(source.train.group_offsets, seed=0, epoch=0)
    group = int(order.groups[-1])  # of the last window: it is not read ahead
    path = folder.data / manifest.shards[group].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    with feed_of(source).steps(0) as steps:
        seen = [next(steps)]
        path.write_bytes(content)
        with refuses(CorruptionError, f"part-{group:08d}"):
            seen.extend(steps)
    assert 1 < len(seen) < feed_of(source).steps_per_epoch
    assert not prefetching()


def test_a_lost_shard_or_an_error_ends_the_stream(forty_units):
    source = opened(forty_units)
    with suppress(KeyError), feed_of(source).steps(0) as steps:
        next(steps)
        raise KeyError
    assert not prefetching()
    folder, manifest = forty_units
    for shard in manifest.shards:
        (folder.data / shard.file).unlink()
    with feed_of(source).steps(0) as steps, pytest.raises(AlignError):
        next(steps)
    assert not prefetching()


ROWS, TOKENS = 32, (150, 250)
GROUP = 4 * ROWS * 200 * (1 + 4)  # bytes of token ids in a row group: a prompt, four completions
WINDOW = GROUP * ROW_GROUPS_PER_WINDOW


def peak_of(folder, *, row_groups, epochs):
    """Bytes that numpy and Arrow hold at most while every row is streamed."""
    block = block_of(ROWS, tokens=TOKENS, token_logps=False)
    cache = write_cache(folder, [block] * row_groups)
    source = opened(cache, kind="paired", check=unchecked)
    read_shard(cache[0].data / cache[1].shards[0].file)  # what it imports is no part of a stream
    feed = feed_of(source, epochs=epochs, batch_size=16, tokens_per_batch=4096)
    arrow, before = [], pa.total_allocated_bytes()  # what tests before this one left
    tracemalloc.start()
    try:
        with feed.steps(0) as steps:
            for _ in steps:
                arrow.append(pa.total_allocated_bytes())
        return tracemalloc.get_traced_memory()[1] + max(arrow) - before
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_windows_whatever_is_streamed(tmp_path):
    peak = peak_of(tmp_path / "cache", row_groups=3 * ROW_GROUPS_PER_WINDOW, epochs=2)
    assert peak < 4 * WINDOW
