"""Which prompts' completions of a label are learned from, against whole numbers one by one."""

import pyarrow.parquet as pq
import pytest

from align.schemas.methods import Labels
from align.schemas.rows import Role
from align.stages.feed.epoch_order import key_of
from support.shard_cache import PAIR, block_of, feed_of, opened, write_cache

MANY = (Role.UNDESIRABLE, Role.DESIRABLE, Role.DESIRABLE)
SHARES = {"label_shares": (0.5, 0.25), "seed": 3}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Pairs, and rows of three labels."""
    blocks = [block_of(40, seed=unit, roles=(PAIR, MANY)[unit % 2]) for unit in range(6)]
    return write_cache(tmp_path_factory.mktemp("made") / "cache", blocks)


def place_of(key, seed):
    """Where a prompt stands in the order that the seed draws, from 0 to 1: splitmix64's hash."""
    most = 2**64
    mixed = (key * 0x9E3779B97F4A7C15 + key_of("prompts with a label", seed)) % most
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % most
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % most
    return (mixed ^ (mixed >> 31)) / most


def expected(cache, *, eval_fraction):
    """The completions that are learned from, by their row and tokens."""
    folder, manifest = cache
    for shard in manifest.shards:
        for row in pq.read_table(folder.data / shard.file).to_pylist():
            if row["split_key"] < eval_fraction * 2**64:
                continue
            place = place_of(row["split_key"], SHARES["seed"])
            for role, ids in zip(row["role"], row["completion_ids"], strict=True):
                is_good = role in {Role.CHOSEN, Role.DESIRABLE}
                if role != Role.MISMATCHED and (place < 0.5 if is_good else place >= 0.75):
                    yield row["row_id"], is_good, tuple(ids)


def learned(source, name="steps"):
    feed = feed_of(source)
    with feed.steps(0) if name == "steps" else feed.held_out() as steps:
        for step in steps:
            for micro in step.own:
                roles = iter(micro.block.roles.tolist())
                for row_id, tree in zip(micro.row_ids, micro.trees, strict=True):
                    for ids in tree.branches:
                        yield row_id, next(roles) == Role.DESIRABLE, tuple(ids.tolist())


def test_the_first_prompts_give_desirable_completions(cache):
    source = opened(cache, eval_fraction=0.2, **SHARES)
    found, wanted = sorted(learned(source)), sorted(expected(cache, eval_fraction=0.2))
    assert found == wanted
    good, bad = ({row for row, is_good, _ in found if is_good == of} for of in (True, False))
    assert good
    assert bad
    assert not good & bad  # shares of at most 1 together
    assert source.labels == Labels(*(sum(one[1] == of for one in found) for of in (True, False)))
    assert any("train.undesirable_share" in note for note in source.notes)


def test_held_out_rows_keep_both_labels(cache):
    plain, thinned = (opened(cache, eval_fraction=0.2, **way) for way in ({}, SHARES))
    assert sorted(learned(plain, "held out")) == sorted(learned(thinned, "held out")) != []


def test_another_seed_draws_other_prompts(cache):
    one, other = (
        {row for row, *_ in learned(opened(cache, label_shares=(0.5, 0.0), seed=seed))}
        for seed in (0, 1)
    )
    assert 0.15 < len(one & other) / len(one | other) < 0.6
