"""How often rows are drawn by the weights of their files, against counts made one by one."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.cache import InputEntry
from align.schemas.columns import offsets_of
from align.schemas.errors import CorruptionError, UsageError
from align.schemas.methods import Labels
from align.schemas.row_table import sources
from align.schemas.rows import Role
from align.stages.feed.epoch_order import shuffled_order
from align.stages.feed.file_weights import Draws, weights_of
from support.refusals import refuses
from support.shard_cache import PAIR, block_of, feed_of, opened, write_cache

FILES = ("one.jsonl", "two.parquet", "three.jsonl.gz")


def entry(name, sha256=""):
    sha256 = sha256 or f"{name.encode().hex():0<64}"
    return InputEntry(name=name, sha256=sha256, bytes=1, rows=1)


def draws_of(counts, weights):
    file_of = np.repeat(np.arange(len(counts)), counts).astype(np.int16)
    return Draws.of(np.random.default_rng(0).permutation(file_of), weights)


@pytest.mark.parametrize(
    ("rows", "weight", "draws"),
    [
        (4, 0.5, 2),
        (3, 1.5, 5),
        (10, 0.25, 3),
        (10, 0.24, 2),
        (5, 0.1, 1),
        (4, 0.0, 0),
        (7, 2.0, 14),
    ],
)
def test_an_epoch_draws_the_rounded_product(rows, weight, draws):
    """1.5 x 3 is 4.5, 0.25 x 10 is 2.5 and 0.1 x 5 is 0.5: half a draw is one."""
    assert draws_of([rows], [weight]).per_epoch == (draws,)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0.3, 0.5, 1, 1.7, 3])), min_size=1),
    st.integers(0, 3),
)
def test_no_row_of_a_file_is_ever_more_than_one_draw_ahead_of_another(files, seed):
    draws = draws_of(*map(list, zip(*files, strict=True)))
    so_far = np.zeros(len(draws.file_of), dtype=np.int64)
    for epoch in range(12):
        so_far += draws.times(seed=seed, epoch=epoch)
        for file, per_epoch in enumerate(draws.per_epoch):
            own = so_far[draws.file_of == file]
            assert own.sum() == (epoch + 1) * per_epoch * bool(len(own))
            assert own.max(initial=0) - own.min(initial=own.max(initial=0)) <= 1


def test_two_epochs_of_halves_are_all_rows_and_a_seed_chooses_them():
    draws = draws_of([100], [0.5])
    first, second, third = (draws.times(seed=0, epoch=epoch) for epoch in range(3))
    assert (first + second == 1).all()
    assert (first == third).all()
    other = draws.times(seed=1, epoch=0)
    assert 0.3 < (first == other).mean() < 0.7


SIZES = st.lists(st.integers(0, 9), max_size=60)


@given(SIZES, st.integers(0, 3), st.data())
def test_an_order_has_each_row_as_often_as_it_is_drawn(sizes, epoch, data):
    count = sum(sizes)
    times = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    order = shuffled_order(offsets_of(sizes), seed=5, epoch=epoch, times=times.astype(np.int64))
    rows = order.rows(0, len(order)).tolist()
    assert sorted(rows) == [row for row, often in enumerate(times) for _ in range(often)]
    start = data.draw(st.integers(0, len(rows)))
    assert order.rows(start, len(rows)).tolist() == rows[start:]


def test_draws_of_a_row_stand_apart():
    sizes = [20] * 40
    plain = shuffled_order(offsets_of(sizes), seed=0, epoch=1)
    once, twice = (
        shuffled_order(offsets_of(sizes), seed=0, epoch=1, times=np.full(800, often))
        for often in (1, 2)
    )
    assert once.rows(0, 800).tolist() == plain.rows(0, 800).tolist()
    rows = twice.rows(0, 1600).tolist()
    assert sum(one == other for one, other in pairwise(rows)) < 40  # 320 rows in a window


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Twelve shards of ten rows, whose files take turns; the last one has labels of one kind."""
    entries = tuple(map(entry, FILES))
    blocks = []
    for unit in range(12):
        file = [entries[unit % 3].identity] * 10
        roles = (Role.DESIRABLE,) if unit % 3 == 2 else PAIR
        block = block_of(10, seed=unit, roles=roles)
        blocks.append(block.with_columns(source=sources(file, np.arange(10))))
    folder, manifest = write_cache(tmp_path_factory.mktemp("made") / "cache", blocks)
    manifest.inputs = entries
    return folder, manifest


def drawn(source, *, world=1, start=0, **changed):
    """The rows of each step, sorted, over all ranks."""
    shares = []
    for rank in range(world):
        feed = feed_of(source, rank=rank, world=world, **changed)
        with feed.steps(start) as steps:
            shares.append([[row for micro in one.own for row in micro.row_ids] for one in steps])
    return [sorted(chain(*step)) for step in zip(*shares, strict=True)]


WEIGHTS = {"one.jsonl": 2.0, "two": 0.5, "three": 0.0}


def test_steps_draw_by_the_weights_on_any_ranks_and_from_any_step(mixed):
    plain, source = opened(mixed), opened(mixed, file_weights=WEIGHTS)
    assert (source.train_rows, source.train.rows_per_epoch) == (120, 100)  # 40 x 2 + 40 x 0.5 + 0
    steps = drawn(source, epochs=2)
    assert [len(step) for step in steps] == [8] * 12 + [4] + [8] * 12 + [4]
    counts = Counter(row for step in steps for row in step)
    assert sorted(counts.values()) == [1] * 40 + [4] * 40
    for changed in ({"world": 2}, {"world": 3, "tokens_per_batch": 60}):
        assert drawn(source, epochs=2, **changed) == steps
    assert drawn(source, epochs=2, start=5) == steps[5:]
    assert drawn(source, epochs=2, start=16) == steps[16:]
    assert source.labels == Labels(100, 100)  # pairs alone
    assert any("one.jsonl: 80 draws" in note for note in source.notes)
    assert drawn(opened(mixed, file_weights={"one": 1.0}), epochs=1) == drawn(plain, epochs=1)


def test_the_held_out_rows_have_no_weights(mixed):
    ways = ({}, {"file_weights": WEIGHTS})
    plain, weighed = (opened(mixed, eval_fraction=0.3, **way) for way in ways)
    assert 0 < plain.eval_rows == weighed.eval_rows
    one, other = (sorted(_held_out(source)) for source in (plain, weighed))
    assert one == other
    trained = {row for step in drawn(weighed, epochs=1) for row in step}
    assert trained
    assert not trained & {*one}


def _held_out(source):
    with feed_of(source).held_out() as steps:
        return [row for step in steps for micro in step.own for row in micro.row_ids]


def test_a_file_is_named_by_its_name_or_its_stem():
    inputs = [*map(entry, FILES), entry("two.jsonl")]
    assert weights_of(inputs, {"one": 2.0, "two.jsonl": 0.0}) == (2.0, 1.0, 1.0, 0.0)
    listed = "one.jsonl, two.parquet, three.jsonl.gz, two.jsonl"
    for given_weights, *names in (
        ({"four": 1.0}, "four", listed),
        ({"two": 1.0}, "two.parquet, two.jsonl", listed),
        ({"one": 1.0, "one.jsonl": 1.0}, "one.jsonl"),
        ({"one": -1.0}, "one", "-1", "1000"),
    ):
        with refuses(UsageError, "train.file_weights", *names):
            weights_of(inputs, given_weights)
    same = [entry("a.jsonl", "c" * 64), entry("b.jsonl", "c" * 64)]
    assert weights_of(same, {"a": 2.0, "b": 2.0}) == (2.0, 2.0)
    with refuses(UsageError, "b.jsonl"):
        weights_of(same, {"a": 2.0})


def test_what_leaves_nothing_or_belongs_to_no_file_is_refused(mixed):
    folder, manifest = mixed
    nothing = {"one": 0.0, "two": 0.0, "three": 0.0}
    with refuses(UsageError, "train.file_weights", folder.root):
        opened((folder, manifest), file_weights=nothing)
    known = dict(vars(manifest))
    known["inputs"] = manifest.inputs[:2]
    with pytest.raises(CorruptionError):
        opened((folder, type(manifest)(**known)), file_weights={"one": 2.0})
