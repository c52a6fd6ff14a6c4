"""`align sample`: what is asked, what is known, what is left out, and what the table says."""

import json

import polars as pl
import pytest

from align.pipeline.executor import Share
from align.pipeline.sample import GROUPS_PER_PART
from align.schemas.errors import BadDataError, LockedError, UsageError
from align.stages.storage.locks import owner_lock
from align.stages.storage.tables import TableFolder, read_table
from support.sampling import CountingSampler, config_of, run_sampling, write_prompts

TEXTS = [f"question {number}" + " more" * (number % 3) for number in range(12)]


@pytest.fixture
def counting(tmp_path):
    return CountingSampler(tmp_path / "log")


@pytest.fixture
def prompts_file(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", TEXTS, answer=[*range(12)])


def table(folder):
    return read_table(TableFolder(folder, "samples"))[1]


def test_every_prompt_gets_its_samples_and_keeps_what_it_carries(tmp_path, counting, prompts_file):
    made = run_sampling(config_of(prompts_file, tmp_path / "out"), counting)
    found = table(tmp_path / "out")
    assert (made.new, made.known, made.manifest.rows) == (48, 0, 48)
    assert found["prompt"].to_list() == [text for text in TEXTS for _ in range(4)]
    assert found["number"].to_list() == [0, 1, 2, 3] * 12
    assert found["answer"].to_list() == [number for number in range(12) for _ in range(4)]
    assert found["prompt_key"].n_unique() == 12
    assert len(counting.drawn()) == 48


def test_the_counts_of_the_manifest_are_those_of_the_table(tmp_path, counting, prompts_file):
    made = run_sampling(config_of(prompts_file, tmp_path / "out"), counting)
    found, counts = table(tmp_path / "out"), made.manifest.counts
    assert counts["cut"] == (found["finish"] == "length").sum() > 0
    assert counts["empty"] == (found["completion"] == "").sum() > 0
    assert counts["completion_tokens"] == found["completion_tokens"].sum()
    assert counts["prompt_tokens"] == 12 * 7
    assert made.manifest.settings["n"] == 4
    assert made.tally.cut == counts["cut"]
    assert f"cut at max_new_tokens: {counts['cut']}; empty: {counts['empty']}" in made.text()
    assert made.text().endswith(f"next: align judge {tmp_path / 'out'} --by …")


def test_the_same_request_draws_nothing_and_opens_no_model(tmp_path, counting, prompts_file):
    config = config_of(prompts_file, tmp_path / "out")
    first = run_sampling(config, counting)
    before = counting.lines()
    again = run_sampling(config, counting)
    assert (again.new, again.known) == (0, 48)
    assert again.manifest == first.manifest
    assert counting.lines() == before


def test_more_samples_draw_only_the_further_ones(tmp_path, counting, prompts_file):
    run_sampling(config_of(prompts_file, tmp_path / "out", n=8), counting)
    before = table(tmp_path / "out")
    more = run_sampling(config_of(prompts_file, tmp_path / "out", n=12), counting)
    assert (more.new, more.known) == (4 * 12, 8 * 12)
    assert len(set(counting.drawn())) == len(counting.drawn()) == 12 * 12
    assert table(tmp_path / "out").filter(pl.col("number") < 8).equals(before)


def test_prompts_in_another_order_draw_nothing_and_order_the_table(
    tmp_path, counting, prompts_file
):
    run_sampling(config_of(prompts_file, tmp_path / "out"), counting)
    turned = write_prompts(tmp_path / "turned.jsonl", TEXTS[::-1])
    again = run_sampling(config_of(turned, tmp_path / "out"), counting)
    assert again.new == 0
    assert table(tmp_path / "out")["prompt"].to_list()[::4] == TEXTS[::-1]


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"seed": 1}, {"max_new_tokens": 9}])
def test_other_settings_are_other_samples(tmp_path, counting, prompts_file, change):
    run_sampling(config_of(prompts_file, tmp_path / "out"), counting)
    assert run_sampling(config_of(prompts_file, tmp_path / "out", **change), counting).new == 48


def test_another_model_is_asked_anew_and_the_first_one_is_still_known(
    tmp_path, counting, prompts_file
):
    config = config_of(prompts_file, tmp_path / "out")
    run_sampling(config, counting)
    other = CountingSampler(tmp_path / "other-log", name="other")
    assert run_sampling(config, other).new == 48
    assert run_sampling(config, counting).new == 0


def test_outputs_may_share_their_answers(tmp_path, counting, prompts_file):
    shared = {"answers": str(tmp_path / "shared")}
    first = run_sampling(config_of(prompts_file, tmp_path / "one", **shared), counting)
    second = run_sampling(config_of(prompts_file, tmp_path / "two", **shared), counting)
    assert (second.new, second.known) == (0, 48)
    assert first.manifest.root == second.manifest.root


def test_equal_prompts_are_asked_once_and_counted(tmp_path, counting):
    prompts_file = write_prompts(tmp_path / "p.jsonl", ["a", "b", "a", "a"])
    made = run_sampling(config_of(prompts_file, tmp_path / "out"), counting)
    assert made.new == 8
    assert made.manifest.counts["rows_that_repeat_a_prompt"] == 2
    assert "left out: 2 rows that repeat a prompt" in made.text()


def test_too_many_bad_rows_are_refused_with_their_places(tmp_path, counting):
    prompts_file = write_prompts(tmp_path / "p.jsonl", ["a", "", None, "b"])
    config = config_of(prompts_file, tmp_path / "out")
    with pytest.raises(BadDataError, match="(?s)2 of 4 rows.*p.jsonl row 1: empty_prompt"):
        run_sampling(config, counting)
    assert not counting.lines()
    allowed = config.__class__(**{**vars(config), "data": config.data.__class__(
        files=config.data.files, max_bad_frac=0.5
    )})  # fmt: skip
    made = run_sampling(allowed, counting)
    assert made.manifest.counts["rows_that_cannot_be_used"] == 2


def test_what_the_model_refuses_is_left_out_and_counted(tmp_path, prompts_file):
    counting = CountingSampler(tmp_path / "log", refuses="question 1")  # 1, 10 and 11
    made = run_sampling(config_of(prompts_file, tmp_path / "out"), counting)
    assert made.manifest.counts["prompts_refused"] == 3
    assert made.manifest.rows == 9 * 4
    assert "3 prompts that the server refuses" in made.text()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_tell_each_other_what_the_model_refuses(tmp_path, prompts_file, order):
    counting = CountingSampler(tmp_path / "log", refuses="question 1")  # 1, 10 and 11
    whole = run_sampling(config_of(prompts_file, tmp_path / "whole"), counting).manifest
    config = config_of(prompts_file, tmp_path / "out")
    made = [run_sampling(config, counting, share=Share(number, 3)) for number in order]
    assert [one.manifest for one in made] == [None, None, whole]
    assert all(len(one.tally.refused) < 3 for one in made), "one part alone met them"
    asked = len(counting.drawn())
    assert run_sampling(config, counting).manifest == whole
    assert len(counting.drawn()) == asked
    willing = CountingSampler(tmp_path / "log")
    again = run_sampling(config, willing)  # what was refused is asked again
    assert (again.new, again.manifest.counts["prompts_refused"]) == (3 * 4, 0)


def test_a_model_that_refuses_everything_is_an_error(tmp_path, prompts_file):
    counting = CountingSampler(tmp_path / "log", refuses="question")
    with pytest.raises(BadDataError, match="refuses all 12 prompts: no"):
        run_sampling(config_of(prompts_file, tmp_path / "out"), counting)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_make_the_table_of_the_whole_and_the_last_one_writes_it(
    tmp_path, counting, prompts_file, count
):
    whole = run_sampling(config_of(prompts_file, tmp_path / "whole"), counting)
    other = CountingSampler(tmp_path / "parts-log")
    config = config_of(prompts_file, tmp_path / "out")
    made = [
        run_sampling(config, other, share=Share(number, count)) for number in range(1, count + 1)
    ]
    assert [one.manifest is None for one in made] == [True] * (count - 1) + [False]
    assert made[-1].manifest == whole.manifest
    assert sum(one.new for one in made) == 48 == len(set(other.drawn())) == len(other.drawn())
    assert all(one.new for one in made), GROUPS_PER_PART
    if count > 1:
        assert made[0].text().startswith(f"part 1/{count} of {tmp_path / 'out'} is done")


def test_a_part_that_did_not_end_is_finished_by_the_command_without_parts(
    tmp_path, counting, prompts_file
):
    config = config_of(prompts_file, tmp_path / "out")
    first = run_sampling(config, counting, share=Share(1, 2))
    rest = run_sampling(config, counting)
    assert first.new + rest.new == 48
    assert rest.known == first.new
    assert rest.manifest


def test_a_second_command_does_not_sample_the_same_beside_the_first(
    tmp_path, counting, prompts_file
):
    config = config_of(prompts_file, tmp_path / "out")
    folder = TableFolder(tmp_path / "out", "samples")
    folder.prepare()
    with owner_lock(folder, "other"), pytest.raises(LockedError, match="choose another --output"):
        run_sampling(config, counting)


def test_a_cache_is_refused_with_the_data_it_was_made_from(tmp_path, counting, journey):
    with pytest.raises(UsageError, match=r"is a cache.*data\.parquet"):
        run_sampling(config_of(journey.cache, tmp_path / "out"), counting)


def test_alpaca_eval_gets_the_first_sample_of_each_prompt(tmp_path, counting):
    prompts_file = write_prompts(tmp_path / "p.jsonl", ["a", "b"], dataset=["helpful", None])
    run_sampling(
        config_of(prompts_file, tmp_path / "out"), counting, alpaca_eval=tmp_path / "e.json"
    )
    found, made = json.loads((tmp_path / "e.json").read_text()), table(tmp_path / "out")
    outputs = made.filter(pl.col("number") == 0)["completion"].to_list()
    assert [(one["instruction"], one["output"]) for one in found] == [
        ("a", outputs[0]),
        ("b", outputs[1]),
    ]
    assert [one["dataset"] for one in found] == ["helpful", "align"]
    assert set(found[0]) == {"dataset", "instruction", "output", "generator"}


def test_alpaca_eval_gets_texts_also_of_prompts_of_both_kinds(tmp_path, counting):
    turn = [{"role": "user", "content": "b"}]
    prompts_file = write_prompts(tmp_path / "p.jsonl", ["a", turn])
    run_sampling(
        config_of(prompts_file, tmp_path / "out"), counting, alpaca_eval=tmp_path / "e.json"
    )
    found = json.loads((tmp_path / "e.json").read_text())
    assert [one["instruction"] for one in found] == ["a", "b"]
    assert not any("role" in one["output"] for one in found)


def test_alpaca_eval_has_no_place_for_several_turns(tmp_path, counting):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    prompts_file = write_prompts(tmp_path / "p.jsonl", [turns])
    with pytest.raises(UsageError, match="user, assistant, user.*single turn"):
        run_sampling(
            config_of(prompts_file, tmp_path / "out"), counting, alpaca_eval=tmp_path / "e.json"
        )
    assert not counting.lines()
