"""Any processes encode the slices, in any order; what they end in never shows it."""

import multiprocessing
import os
import pickle
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from align.pipeline.precompute.opening import open_job
from align.pipeline.precompute.prepare import Encode, Slices, encode, make_plan
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import BadDataError, Interrupted
from align.stages.data import files as data_files
from align.stages.tracking.progress import NoProgress
from support.encoded_rows import plain
from support.one_process import prepared_at_once
from support.patience import PATIENCE
from support.random_data import KINDS, draw_files, small_sizes
from support.stage_one import CHILDREN, contents, run
from support.stub_reference import StubReference

SEED = int(os.environ.get("ALIGN_TEST_SEED", "20"))


@pytest.fixture
def drawn(config, tmp_path):
    """A config over data and settings drawn by chance."""

    def draw(seed):
        chance = random.Random(f"{SEED} {seed}")
        files = draw_files(tmp_path / f"data-{seed}", KINDS[seed % len(KINDS)], chance)
        data = DataOptions(files=list(map(str, files)), max_bad_frac=0.9)
        tokens = TokenOptions(
            max_length=chance.choice([40, 256]),
            max_prompt_length=chance.choice([0, 10]),
            prompt_side=chance.choice(["left", "right"]),
        )
        cache = replace(
            config.cache,
            output=str(tmp_path / f"cache-{seed}"),
            kl_pairs=chance.randint(0, 3),
            shards=chance.choice([0, 0, 1, 7]),
        )
        return replace(config, data=data, tokens=tokens, cache=cache)

    return draw


def encode_in_any_order(job, draw):
    """Encodes every slice, some of them twice, each after a journey through pickle."""
    job.cache.prepare()
    job.cache.prepare_work()
    slices = Slices.of(job)
    order = [*range(len(slices.sizes)), draw.randrange(len(slices.sizes))]
    draw.shuffle(order)
    for number in order:
        pickle.loads(pickle.dumps(Encode(slices)))(number)
    return {"slices": len(slices.sizes), "ranges": slices.ranges}


def planned(job, progress=None):
    """Encodes what is missing, and plans."""
    progress = progress or NoProgress()
    encoded = encode(Slices.of(job), job.config, None, progress=progress)
    return make_plan(job, encoded, progress)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.long)])
def test_slices_in_any_order_end_in_what_one_process_makes_in_memory(drawn, monkeypatch, seeds):
    counts = Counter()
    for seed in seeds:
        config = drawn(seed)
        draw = random.Random(f"order {SEED} {seed}")
        with monkeypatch.context() as patch:
            for module, name, size in small_sizes(draw):
                patch.setattr(module, name, size)
            job = open_job(config, StubReference())
            counts.update(encode_in_any_order(job, draw))
            expected = prepared_at_once(job)
            try:
                plan = planned(job)
            except BadDataError:
                is_much = sum(expected.reasons.values()) > 0.9 * sum(
                    expected.rows_per_file.values()
                )
                assert is_much or (config.cache.kl_pairs and not expected.can_be_paired)
                continue
            assert expected.can_be_paired or not config.cache.kl_pairs
            require_equal(job, plan, expected)
    assert counts["slices"] > 3 * len(seeds)
    assert counts["ranges"] > 2 * len(seeds)


def require_equal(job, plan, expected):
    count, is_long = len(plan.shards), job.shape.declared.is_long
    encoded = Slices.of(job).encoded()
    rows = encoded.rows(
        shards=count, prompt_side=job.config.tokens.prompt_side if is_long else None
    )
    found = [rows.read(shard, Counter()) for shard in range(count)]
    assert [row for keyed in found if keyed for row in plain(keyed)] == expected.rows
    numbers = Counter(place * count >> 64 for place in expected.places)
    assert plan.shards == tuple(numbers[shard] for shard in range(count))
    assert [entry.rows for entry in plan.inputs] == list(expected.rows_per_file.values())
    assert plan.reasons == expected.reasons
    assert [*plan.rejected] == expected.rejected


class Impatient(NoProgress):
    """Asks to stop after some slices."""

    left = 4

    def advance(self, done, *, tokens=0, padding=0):
        """Counts them, and then asks."""
        self.left -= 1
        if self.left == 0:
            raise Interrupted(2)


def test_children_that_are_interrupted_keep_what_is_committed_and_change_no_byte(
    config, data, tmp_path, monkeypatch
):
    """Its few rows are cut into many slices, which two children encode."""
    config = replace(config, data=DataOptions(files=[str(data.paired_jsonl)], workers=2))
    run(replace(config, cache=replace(config.cache, output=str(tmp_path / "clean"))))
    monkeypatch.setattr(data_files, "LEAST_SLICE", 1000)
    monkeypatch.setattr(data_files, "SLICES", 10)
    job = open_job(config, StubReference())
    job.cache.prepare()
    job.cache.prepare_work()
    other = CHILDREN.Process(target=time.sleep, args=(PATIENCE,))  # of whoever calls it
    other.start()
    with pytest.raises(Interrupted):
        planned(job, Impatient())
    # Whoever is interrupted waits for no child.
    assert multiprocessing.active_children() == [other]
    other.kill()
    other.join()
    slices = Slices.of(job)
    done = [*map(slices.find, range(len(slices.sizes)))]
    assert 3 <= len(done) - done.count(None) < len(done)
    run(config)
    assert contents(config.cache.output) == contents(tmp_path / "clean")
