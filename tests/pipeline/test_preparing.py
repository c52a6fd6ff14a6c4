"""Preparing is tasks that any processes make, in any order; what they end in never shows it."""

import multiprocessing
import os
import pickle
import random
import re
import time
from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from align.pipeline.executors.processes import Inline
from align.pipeline.precompute.precompute_plan import make_plan, open_job, preparation_of, ring_of
from align.pipeline.precompute.prepare_tasks import ArrangeTasks, EncodeTasks
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import BadDataError, Interrupted
from align.stages.data import files as data_files
from align.stages.sort import key_ranges
from align.stages.tracking.progress import NoProgress
from support.encoded_rows import all_rows
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
            seed=chance.randint(0, 3),
            kl_pairs=chance.randint(0, 3),
            rows_per_shard=chance.choice([16, 200]),
        )
        return replace(config, data=data, tokens=tokens, cache=cache)

    return draw


def make_by_tasks(job, draw):
    """Makes every task in any order, some of them twice, each after a journey through pickle."""
    job.folder.prepare()
    job.work.prepare()
    preparation = preparation_of(job)
    preparation.ring.spool.prepare()
    counts = []
    for tasks in (EncodeTasks(preparation), ArrangeTasks(preparation)):
        order = [*range(len(tasks.sizes)), draw.randrange(len(tasks.sizes))]
        draw.shuffle(order)
        for task in order:
            make = pickle.loads(pickle.dumps(tasks)).open(NoProgress())
            assert len([*make([task])]) == 1
        counts.append(len(tasks.sizes))
    return counts


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.long)])
def test_tasks_in_any_order_end_in_what_one_process_makes_in_memory(drawn, monkeypatch, seeds):
    counts = Counter()
    for seed in seeds:
        config = drawn(seed)
        draw = random.Random(f"order {SEED} {seed}")
        with monkeypatch.context() as patch:
            for module, name, size in small_sizes(draw):
                patch.setattr(module, name, size)
            job = open_job(config, StubReference())
            counts.update(dict(zip(("slices", "ranges"), make_by_tasks(job, draw), strict=True)))
            try:
                expected = prepared_at_once(job)
            except BadDataError as refused:  # one prompt has too many of the completions
                with pytest.raises(BadDataError, match=re.escape(str(refused))):
                    make_plan(job, "run", Inline(), NoProgress())
                continue
            try:
                plan = make_plan(job, "run", Inline(), NoProgress())
            except BadDataError:
                assert sum(expected.reasons.values()) > 0.9 * sum(expected.rows_per_file.values())
                continue
        require_equal(job, plan, expected)
    assert counts["slices"] > 4 * len(seeds)
    assert counts["ranges"] > 2 * len(seeds)


def require_equal(job, plan, expected):
    ring = ring_of(job)
    assert all_rows(ring) == expected.rows
    assert ring.partners(0, ring.rows.num_completions).tolist() == expected.partners
    assert plan.unit_offsets == expected.offsets
    assert [entry.rows for entry in plan.inputs] == list(expected.rows_per_file.values())
    assert plan.quarantined == expected.reasons
    stored = [pq.read_table(job.folder.root / entry.file).to_pylist() for entry in plan.quarantine]
    assert [
        (row["file"], row["row"], row["reason"], row["detail"]) for rows in stored for row in rows
    ] == [(f"{one.file:016x}", one.row, one.reason, one.detail) for one in expected.rejected]
    assert not list(ring.spool.encoded(0).parent.iterdir())


class Impatient(NoProgress):
    """Asks to stop after some tasks."""

    left = 4

    def advance(self, done, *, tokens=0, padding=0):
        """Counts tasks, and then asks."""
        self.left -= 1
        if self.left == 0:
            raise Interrupted(2)


def test_children_that_are_interrupted_keep_what_is_committed_and_change_no_byte(
    config, data, tmp_path, monkeypatch
):
    """Its few rows are cut into many slices and ranges, which two children make."""
    config = replace(config, data=DataOptions(files=[str(data.paired_jsonl)], workers=2))
    run(replace(config, cache=replace(config.cache, output=str(tmp_path / "clean"))))
    monkeypatch.setattr(data_files, "LEAST_SLICE", 1000)
    monkeypatch.setattr(data_files, "SLICES", 10)
    monkeypatch.setattr(key_ranges, "BYTES_PER_RANGE", 4000)
    job = open_job(config, StubReference())
    job.folder.prepare()
    job.work.prepare()
    other = CHILDREN.Process(target=time.sleep, args=(PATIENCE,))  # of whoever calls it
    other.start()
    with pytest.raises(Interrupted):
        make_plan(job, "run", Inline(), Impatient())
    # Whoever is interrupted waits for no child.
    assert multiprocessing.active_children() == [other]
    other.kill()
    other.join()
    preparation = preparation_of(job)
    assert preparation.num_ranges > 2
    tasks = EncodeTasks(preparation)
    assert 3 <= sum(map(tasks.is_committed, range(len(tasks.sizes)))) < len(tasks.sizes)
    run(config)
    assert contents(config.cache.output) == contents(tmp_path / "clean")
