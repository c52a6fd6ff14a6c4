"""Batches of a cache, against its rows read slowly and one by one."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.schemas.batches import Cursor
from align.schemas.config import (
    CacheOptions,
    Config,
    DataOptions,
    ModelOptions,
    TokenOptions,
    TrackingOptions,
)
from align.schemas.rows import Role
from align.stages.demo.preferences import make_data
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from support.shard_cache import PAIR, block_of, feed_of, opened, write_cache
from support.stage_one import run

START = Cursor(0, 0)
LABELLED = (Role.UNDESIRABLE, Role.DESIRABLE)
WORLDS = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def pairs_and_labels(tmp_path_factory):
    """Pairs and labelled rows, two partners for each completion, in 30 row groups."""
    blocks = [
        block_of(9 + unit % 4, seed=unit, levels=2, roles=LABELLED if unit % 3 else PAIR)
        for unit in range(30)
    ]
    return write_cache(tmp_path_factory.mktemp("made") / "cache", blocks)


@pytest.fixture(scope="module", params=["paired", "unpaired"])
def real(request, tmp_path_factory, tokenizer_folder):
    """What stage 1 makes of a small data set, scored by a stub."""
    folder = tmp_path_factory.mktemp("real")
    data = make_data(folder / "data", rows=80)
    run(
        Config(
            model=ModelOptions(path=tokenizer_folder),
            data=DataOptions(files=[str(getattr(data, request.param))]),
            tokens=TokenOptions(max_length=256),
            cache=CacheOptions(
                output=str(folder / "cache"), rows_per_shard=16, kl_pairs=2, reuse_known=False
            ),
            tracking=TrackingOptions(mlflow=False),
        )
    )
    cache = CacheFolder(folder / "cache")
    return cache, load_manifest(cache)


def batches_of(source, *, start=START, **changed):
    with feed_of(source, **changed).steps(start) as steps:
        return list(steps)


def rows_of(cache):
    """Every stored row by its id."""
    folder, manifest = cache
    tables = [pq.read_table(folder.data / shard.file) for shard in manifest.shards]
    return {row["row_id"]: row for table in tables for row in table.to_pylist()}


def branches_of(batches, *, mismatched=False):
    """Each branch of one step by its place: row, prompt, ids, role, reference, token log-probs."""
    found = {}
    for batch in batches:
        for micro in batch.mismatched if mismatched else batch.own:
            index = 0
            for row_id, tree in zip(micro.row_ids, micro.trees, strict=True):
                for branch in tree.branches:
                    kept = micro.reference_tokens
                    found[int(micro.places[index])] = (
                        row_id,
                        tree.prompt.tolist(),
                        branch.tolist(),
                        int(micro.roles[index]),
                        float(micro.reference[index]),
                        None if kept is None else kept[index].tolist(),
                    )
                    index += 1
            assert index == len(micro.roles) == len(micro.reference) == len(micro.scores)
            assert len(micro.trees) == len(micro.row_ids)
            assert all(len(column) == len(micro.trees) for column in micro.carried.values())
    return [found[place] for place in range(len(found))]


def expected_branches(row, *, levels, level=None):
    """What a method that reads labels sees of a stored row: its own branches or one level."""
    count = len(row["role"]) // (1 + levels)
    start = 0 if level is None else count * (1 + level)
    kept = row.get("ref_token_logps")
    result = []
    for place in range(start, start + count):
        role = row["role"][place - start] % 2 + 2 if level is None else Role.MISMATCHED
        tokens = None if kept is None else kept[place]
        ids, logp = row["completion_ids"][place], row["ref_logp"][place]
        result.append((row["row_id"], row["prompt_ids"], ids, role, logp, tokens))
    return result


def order_of(branches):
    """The rows of a step, in order."""
    return list(dict.fromkeys(branch[0] for branch in branches))


def test_batches_hold_what_the_cache_holds(pairs_and_labels):
    require_all_that_is_stored(pairs_and_labels)


def test_batches_hold_what_stage_one_wrote(real):
    require_all_that_is_stored(real)


def require_all_that_is_stored(cache):
    source, rows = opened(cache), rows_of(cache)
    shares = [batches_of(source, rank=rank, world=2, epochs=3) for rank in range(2)]
    seen = []
    for step in zip(*shares, strict=True):
        own = branches_of(step)
        ids = order_of(own)
        seen += ids
        epoch = step[0].cursor.epoch
        assert own == [one for row in ids for one in expected_branches(rows[row], levels=2)]
        assert branches_of(step, mismatched=True) == [
            one for row in ids for one in expected_branches(rows[row], levels=2, level=epoch % 2)
        ]
        for batch in step:
            chosen = [len(branch[2]) for branch in own if branch[3] == Role.DESIRABLE]
            assert (batch.rows, batch.branches) == (len(ids), len(own))
            assert batch.mismatched_branches == len(own)
            assert batch.tokens == sum(len(branch[2]) for branch in own)
            assert batch.chosen_tokens == sum(chosen)
    for epoch in range(3):
        once = seen[epoch * len(rows) : (epoch + 1) * len(rows)]
        assert sorted(once) == sorted(rows)


@pytest.mark.parametrize("budget", [1, 100, 10_000])
@pytest.mark.parametrize("world", WORLDS)
def test_steps_are_the_same_for_any_world_and_budget(pairs_and_labels, world, budget):
    source = opened(pairs_and_labels)
    changed = {"batch_size": 23, "kl_per_step": 7, "tokens_per_batch": budget}
    shares = [batches_of(source, rank=rank, world=world, **changed) for rank in range(world)]
    alone = batches_of(source, batch_size=23, kl_per_step=7)
    for step, same in zip(zip(*shares, strict=True), alone, strict=True):
        assert branches_of(step) == branches_of([same])
        assert branches_of(step, mismatched=True) == branches_of([same], mismatched=True)
        for passes in ([batch.own for batch in step], [batch.mismatched for batch in step]):
            assert len({len(batches) for batches in passes}) == 1
            trees = [micro.trees for batches in passes for micro in batches]
            sizes = [[tree.num_tokens for tree in one] for one in trees]
            assert all(sum(size) <= budget or len(size) == 1 for size in sizes)


def same_batches(left, right):
    """Whether two lists of batches are equal in every array."""
    return [_plain(batch) for batch in left] == [_plain(batch) for batch in right]


def _plain(value):
    if dataclasses.is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.slow
def test_any_step_can_be_gone_on_from(pairs_and_labels):
    """At each step of an epoch of 63 and over its edge, and from there again to the end."""
    source = opened(pairs_and_labels)
    changed = {"batch_size": 5, "epochs": 2, "world": 3, "rank": 1}
    feed = feed_of(source, **changed)
    whole = batches_of(source, **changed)
    assert (feed.steps_per_epoch, len(whole)) == (63, 126)
    for done in range(68):
        start = Cursor(done // 63, done % 63)
        assert whole[done].cursor == start
        with feed.steps(start) as steps:
            rest = list(steps) if done % 16 == 15 else [next(steps), next(steps)]
        same = whole[done:] if done % 16 == 15 else whole[done : done + 2]
        assert same_batches(rest, same)


def test_a_cursor_behind_the_last_step_is_the_next_epoch(pairs_and_labels):
    source = opened(pairs_and_labels)
    whole = batches_of(source, epochs=2)
    per_epoch = feed_of(source).steps_per_epoch
    assert same_batches(batches_of(source, start=Cursor(0, per_epoch), epochs=2), whole[per_epoch:])
    assert batches_of(source, start=Cursor(2, 0), epochs=2) == []


@pytest.mark.parametrize("batch_size", [1, 40, 250, 1000])
def test_a_step_may_be_smaller_or_larger_than_a_window(pairs_and_labels, batch_size):
    source = opened(pairs_and_labels)
    batches = batches_of(source, batch_size=batch_size)
    ids = [row for batch in batches for row in order_of(branches_of([batch]))]
    assert len(batches) == -(-source.train_rows // batch_size)
    assert sorted(ids) == sorted(rows_of(pairs_and_labels))


def test_a_rank_with_nothing_to_do_runs_empty_batches_of_the_same_columns(pairs_and_labels):
    source = opened(pairs_and_labels)
    shares = [batches_of(source, rank=rank, world=8, batch_size=3) for rank in range(8)]
    for step in zip(*shares, strict=True):
        for batch in step:
            for micro in batch.own + batch.mismatched:
                assert set(micro.carried) == {"weight"}
                assert micro.reference_tokens is not None
                assert micro.reference.dtype == np.float64
                assert micro.places.dtype == np.int64
        assert sum(len(micro.trees) for batch in step for micro in batch.own) == step[0].rows


def test_rows_that_a_method_does_not_read_are_in_no_batch(pairs_and_labels):
    source = opened(pairs_and_labels, kind="paired", mismatched=False)
    batches = batches_of(source)
    rows = rows_of(pairs_and_labels)
    wanted = [row for row, stored in rows.items() if stored["role"][0] == Role.CHOSEN]
    found = [branch for batch in batches for branch in branches_of([batch])]
    assert sorted(order_of(found)) == sorted(wanted)
    assert {branch[3] for branch in found} == {Role.CHOSEN, Role.REJECTED}
    assert all(batch.mismatched == () for batch in batches)


@pytest.mark.parametrize("world", [1, 3])
def test_held_out_rows_are_met_in_one_order_and_never_trained_on(pairs_and_labels, world):
    source = opened(pairs_and_labels, eval_fraction=0.3)
    passes = []
    for _ in range(2):
        shares = []
        for rank in range(world):
            with feed_of(source, rank=rank, world=world).held_out() as steps:
                shares.append(list(steps))
        branches = [one for step in zip(*shares, strict=True) for one in branches_of(step)]
        passes.append(order_of(branches))
    trained = {branch[0] for batch in batches_of(source) for branch in branches_of([batch])}
    assert (
        passes[0] == passes[1] == [row for row in rows_of(pairs_and_labels) if row not in trained]
    )
    assert len(passes[0]) == source.eval_rows > 50


def test_a_source_without_held_out_rows_says_so(pairs_and_labels):
    feed = feed_of(opened(pairs_and_labels))
    assert not feed.has_held_out
    with feed.held_out() as steps:
        assert list(steps) == []


def test_a_batch_keeps_nothing_else_in_memory(pairs_and_labels):
    batch = batches_of(opened(pairs_and_labels), batch_size=2)[0]
    (micro,) = batch.own
    held = {id(branch.base): branch.base.nbytes for tree in micro.trees for branch in tree.branches}
    assert sum(held.values()) == 4 * sum(len(b) for tree in micro.trees for b in tree.branches)
