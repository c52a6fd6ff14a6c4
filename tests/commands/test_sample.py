"""`align sample`: what is asked, what is known, what is left out, and what the table says."""

from dataclasses import replace

import polars as pl
import pytest

from align.pipeline.parts import Part
from align.pipeline.tables import samplers
from align.schemas.errors import BadDataError, LockedError, UsageError
from align.schemas.samples import Distribution
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.tables import TableFolder, read_table
from support.refusals import refuses
from support.sampling import CountingSampler, config_of, run_sampling, write_prompts

TEXTS = [f"question {number}" + " more" * (number % 3) for number in range(12)]


@pytest.fixture
def counting(tmp_path):
    return CountingSampler(tmp_path / "log")


@pytest.fixture
def prompts_file(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", TEXTS, answer=[*range(12)])


@pytest.fixture
def config(prompts_file, tmp_path):
    return config_of(prompts_file, tmp_path / "out")


@pytest.fixture
def table(tmp_path):
    return lambda: read_table(TableFolder(tmp_path / "out", "samples"))[1]


def test_every_prompt_gets_its_samples(config, counting, table):
    made = run_sampling(config, counting)
    found, counts = table(), made.manifest.counts
    assert (made.counts.new, made.counts.known, made.manifest.rows) == (48, 0, 48)
    assert made.manifest.sampling == Distribution(temperature=1.0, top_p=1.0, top_k=0)
    assert found["prompt"].to_list() == [text for text in TEXTS for _ in range(4)]
    assert found["number"].to_list() == [0, 1, 2, 3] * 12
    assert found["answer"].to_list() == [number for number in range(12) for _ in range(4)]
    assert len(counting.drawn()) == 48
    assert counts["cut"] == (found["finish"] == "length").sum() > 0
    assert counts["empty"] == (found["completion"] == "").sum() > 0
    assert counts["completion_tokens"] == found["completion_tokens"].sum()
    assert counts["prompt_tokens"] == 12 * 7
    before = counting.lines()
    again = run_sampling(config, counting)  # draws nothing and opens no model
    assert (again.counts.new, again.counts.known, again.manifest) == (0, 48, made.manifest)
    assert counting.lines() == before


def test_only_missing_samples_are_drawn(tmp_path, counting, prompts_file, table):
    run_sampling(config_of(prompts_file, tmp_path / "out", n=8), counting)
    before = table()
    more = run_sampling(config_of(prompts_file, tmp_path / "out", n=12), counting)
    assert (more.counts.new, more.counts.known) == (4 * 12, 8 * 12)
    assert len(set(counting.drawn())) == len(counting.drawn()) == 12 * 12
    assert table().filter(pl.col("number") < 8).equals(before)
    turned = write_prompts(tmp_path / "turned.jsonl", TEXTS[::-1])
    assert run_sampling(config_of(turned, tmp_path / "out", n=12), counting).counts.new == 0
    assert table()["prompt"].to_list()[::12] == TEXTS[::-1]


def test_other_settings_or_models_are_other_samples(tmp_path, config, counting, prompts_file):
    run_sampling(config, counting)
    for change in ({"temperature": 0.5}, {"seed": 1}, {"max_new_tokens": 9}):
        changed = config_of(prompts_file, tmp_path / "out", **change)
        assert run_sampling(changed, counting).counts.new == 48, change
    other = CountingSampler(tmp_path / "other-log", name="other")
    assert run_sampling(config, other).counts.new == 48
    first = run_sampling(config, counting)
    assert first.counts.new == 0
    shared = {"answers": str(tmp_path / "out" / "_align" / "answers")}
    second = run_sampling(config_of(prompts_file, tmp_path / "two", **shared), counting)
    assert (second.counts.new, second.counts.known, second.manifest.root) == (
        0,
        48,
        first.manifest.root,
    )


def test_repeated_and_unusable_rows_are_counted(tmp_path, counting):
    prompts_file = write_prompts(tmp_path / "p.jsonl", ["a", "", None, "b", "a"])
    config = config_of(prompts_file, tmp_path / "out")
    with refuses(BadDataError, "2 of 5", "p.jsonl row 1", "empty_prompt"):
        run_sampling(config, counting)
    assert not counting.lines()
    allowed = replace(config, data=replace(config.data, max_bad_frac=0.5))
    made = run_sampling(allowed, counting)
    assert made.counts.new == 8
    counts = made.manifest.counts
    assert (counts["rows_that_repeat_a_prompt"], counts["rows_that_cannot_be_used"]) == (1, 2)


def test_parts_make_the_table_of_the_whole(tmp_path, prompts_file, config):
    counting = CountingSampler(tmp_path / "log", refuses="question 1")  # 1, 10 and 11
    whole = run_sampling(config_of(prompts_file, tmp_path / "whole"), counting)
    assert whole.manifest.counts["prompts_refused"] == 3
    assert whole.manifest.rows == 9 * 4
    parts = CountingSampler(tmp_path / "parts-log", refuses="question 1")
    made = [run_sampling(config, parts, part=Part(number, 3)) for number in (3, 1, 2)]
    assert [one.manifest for one in made] == [None, None, whole.manifest]
    assert all(one.counts.new for one in made)
    assert all(len(one.counts.refused) < 3 for one in made), "one part alone met them"
    assert len(set(parts.drawn())) == len(parts.drawn()) == 9 * 4
    # The command without parts does what a part that did not end has left.
    alone = config_of(prompts_file, tmp_path / "alone")
    part = run_sampling(alone, counting, part=Part(1, 2))
    rest = run_sampling(alone, counting)
    assert (rest.counts.new, rest.counts.known) == (36 - part.counts.new, part.counts.new)
    assert rest.manifest == whole.manifest
    willing = CountingSampler(tmp_path / "willing-log")
    again = run_sampling(config, willing)  # what was refused is asked again
    assert (again.counts.new, again.manifest.counts["prompts_refused"]) == (3 * 4, 0)


def test_what_another_command_draws_meanwhile_is_not_drawn_again(
    tmp_path, prompts_file, monkeypatch
):
    """The other one draws all 48 samples after this one has chosen a first group of five."""
    monkeypatch.setattr(samplers, "ANSWERS_AT_ONCE", 5)
    shared = {"answers": str(tmp_path / "answers")}
    other = config_of(prompts_file, tmp_path / "other", **shared)

    class Overtaken(CountingSampler):
        def open(self, sampling):
            run_sampling(other, CountingSampler(self.log))
            return super().open(sampling)

    counting = Overtaken(tmp_path / "log")
    made = run_sampling(config_of(prompts_file, tmp_path / "out", **shared), counting)
    assert made.manifest.rows == 48
    assert len(counting.drawn()) == 48 + 5


def test_what_cannot_be_sampled_is_refused(tmp_path, config, counting, journey):
    refusing = CountingSampler(tmp_path / "log", refuses="question")
    with refuses(UsageError, "12 prompts", "no."):
        run_sampling(config, refusing)
    with refuses(UsageError, journey.cache, "data.parquet"):
        run_sampling(config_of(journey.cache, tmp_path / "out"), counting)
    folder = TableFolder(tmp_path / "out", "samples")
    folder.prepare()
    with owner_lock(folder.root, "other"), refuses(LockedError, folder.root, "--output"):
        run_sampling(config, counting)


def test_parts_in_a_store_need_a_folder_of_answers(prompts_file, counting):
    there = config_of(prompts_file, "s3://bucket/out")
    in_a_store = config_of(prompts_file, "out", answers="s3://bucket/answers")
    for config, part in ((there, Part(1, 2)), (in_a_store, None)):
        with refuses(UsageError, "sample.answers"):
            run_sampling(config, counting, part=part)
