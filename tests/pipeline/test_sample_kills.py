"""Sampling is killed anywhere: the same samples, and none drawn twice but those in flight."""

import pytest

from align.stages.storage.failpoints import OF_A_TABLE
from align.stages.storage.tables import TableFolder, read_table
from support.sampling import (
    BATCH,
    CountingSampler,
    config_of,
    exit_code_of_child,
    run_sampling,
    write_prompts,
)
from support.trainings import KILLED

TEXTS = [f"question {number}" for number in range(12)]


@pytest.fixture(scope="module")
def undisturbed_samples(tmp_path_factory):
    """Prompts, and the table that an undisturbed run makes of them."""
    folder = tmp_path_factory.mktemp("asked")
    prompts = write_prompts(folder / "prompts.jsonl", TEXTS)
    run_sampling(config_of(prompts, folder / "out"), CountingSampler(folder / "log"))
    return prompts, read_table(TableFolder(folder / "out", "samples"))


@pytest.mark.parametrize("failpoint", OF_A_TABLE)
def test_a_kill_at_any_place_of_writing_loses_nothing_that_was_kept(
    tmp_path, undisturbed_samples, failpoint
):
    prompts, (manifest, table) = undisturbed_samples
    sampler, config = CountingSampler(tmp_path / "log"), config_of(prompts, tmp_path / "out")
    assert exit_code_of_child(config, sampler, f"{failpoint}=kill@2") == KILLED
    before = len(sampler.drawn())
    run_sampling(config, sampler)
    found, made = read_table(TableFolder(tmp_path / "out", "samples"))
    assert found == manifest
    assert made.equals(table)
    assert len(set(sampler.drawn())) == len(TEXTS) * 4
    kept = {"answers.before_link": BATCH, "answers.after_link": 2 * BATCH}.get(failpoint, before)
    assert len(sampler.drawn()) - before == len(TEXTS) * 4 - kept
    # A draft without content stays: its writer may live, and not have locked it yet.
    assert not [path for path in tmp_path.rglob(".*.tmp") if path.stat().st_size]
