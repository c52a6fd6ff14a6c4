"""Sampling is killed anywhere: the same samples, and none drawn twice but those in flight."""

import os
import random

import pytest

from align.pipeline.executor import Share
from align.stages.storage.failpoints import OF_A_TABLE
from align.stages.storage.tables import TableFolder, read_table
from support.patience import PATIENCE
from support.sampling import (
    BATCH,
    CountingSampler,
    config_of,
    run_sampling,
    sampling_child,
    write_prompts,
)
from support.trainings import KILLED

SEED = int(os.environ.get("ALIGN_TEST_SEED", "17"))
TEXTS = [f"question {number}" for number in range(12)]
FEW_AND_MANY = [3, pytest.param(16, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def undisturbed_samples(tmp_path_factory):
    """Prompts, and the table that an undisturbed run makes of them."""
    folder = tmp_path_factory.mktemp("asked")
    prompts = write_prompts(folder / "prompts.jsonl", TEXTS)
    run_sampling(config_of(prompts, folder / "out"), CountingSampler(folder / "log"))
    return prompts, read_table(TableFolder(folder / "out", "samples"))


def require_as_undisturbed(output, sampler, undisturbed_samples, kills):
    """The table is that of an undisturbed run, and only what was in flight was drawn again."""
    manifest, table = undisturbed_samples[1]
    found, made = read_table(TableFolder(output, "samples"))
    assert found == manifest
    assert made.equals(table)
    assert len(set(sampler.drawn())) == len(TEXTS) * 4
    assert len(sampler.drawn()) <= len(TEXTS) * 4 + kills * BATCH
    # A draft without content stays: its writer may live, and not have locked it yet.
    left = [path.name for path in output.rglob(".*.tmp") if path.stat().st_size]
    assert not left


@pytest.mark.parametrize("failpoint", OF_A_TABLE)
def test_a_kill_at_any_place_of_writing_loses_nothing_that_was_kept(
    tmp_path, undisturbed_samples, failpoint
):
    sampler = CountingSampler(tmp_path / "log")
    config = config_of(undisturbed_samples[0], tmp_path / "out")
    process = sampling_child(config, sampler, f"{failpoint}=kill@2")
    process.join(PATIENCE)
    assert process.exitcode == KILLED
    before = len(sampler.drawn())
    run_sampling(config, sampler)
    require_as_undisturbed(tmp_path / "out", sampler, undisturbed_samples, kills=1)
    kept = {"answers.before_link": BATCH, "answers.after_link": 2 * BATCH}.get(failpoint, before)
    assert len(sampler.drawn()) - before == len(TEXTS) * 4 - kept


@pytest.mark.parametrize("least", FEW_AND_MANY)
def test_kills_at_random_moments_end_in_the_same_samples(tmp_path, undisturbed_samples, least):
    draw, kills, history = random.Random(SEED), 0, 0
    while kills < least:
        history += 1
        output = tmp_path / f"out-{history}"
        sampler = CountingSampler(tmp_path / f"log-{history}", pause=0.05)
        shares = [Share(1, 2), Share(2, 2)] if draw.random() < 0.5 else [None]
        own = 0
        for _ in range(3):
            config = config_of(undisturbed_samples[0], output)
            processes = [sampling_child(config, sampler, share=share) for share in shares]
            for process in processes:
                process.join(draw.uniform(0.05, 0.8))
                own += process.exitcode is None
                process.kill()
                process.join(PATIENCE)
                assert process.exitcode in {0, KILLED}
        run_sampling(config_of(undisturbed_samples[0], output), sampler)
        require_as_undisturbed(output, sampler, undisturbed_samples, own)
        kills += own
    print(f"ALIGN_TEST_SEED={SEED}: {kills} kills in {history} histories")
