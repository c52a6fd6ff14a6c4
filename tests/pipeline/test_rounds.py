"""Rounds as a person gives them: what they pay for, once, and what they refuse."""

import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import polars as pl
import pytest

from align.stages.storage.rounds_folder import RoundsFolder
from support.chat_server import chat_server
from support.command import refusal
from support.mlflow_runs import open_store
from support.rounds_play import counted, play, prompts_in, record, records, write_settings
from support.stub_judge import PARTS
from support.trainings import KILLED


@dataclass(frozen=True)
class Played:
    """Two rounds, the same command again, and one round more."""

    path: object
    folder: object
    planned: str
    answers: list
    paid: list
    records: list  # after each command


@pytest.fixture(scope="module")
def played(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    path = write_settings(folder, world)
    planned = play(path, "--dry-run").out
    assert not (folder / "out").exists()
    answers, paid, left = [], [], []
    for words in ((), (), ("--count", 3)):
        with counted() as now:
            answers.append(play(path, *words))
        assert answers[-1].code == 0, answers[-1]
        paid.append(now)
        left.append(records(folder / "out"))
    return Played(path, folder / "out", planned, answers, paid, left)


def held_out_count(played):
    return pl.read_parquet(played.folder / "held-out" / "prompts.parquet").height


def test_every_sample_and_every_judgment_is_paid_once(played):
    # 8 prompts with 3 samples each in either round; held out: the beginning and two policies.
    held_out = held_out_count(played)
    assert held_out > 0
    sampled = played.paid[0].sampled
    assert len(sampled) == 2 * 8 * 3 + 3 * held_out
    assert played.paid[0].judged <= len(sampled)


def test_the_same_command_again_computes_nothing_and_changes_nothing(played):
    assert (played.paid[1].sampled, played.paid[1].judged) == ([], 0)
    assert played.records[1] == played.records[0]
    assert "0 rounds made now, 2 known before" in played.answers[1].out


def test_no_policy_of_a_finished_training_is_held_while_another_one_samples(played):
    before, *later = played.paid[0].engines
    assert len(later) == 4  # of the beginning, of round 1, of round 2, of round 2
    assert set(later) == {before}


def test_one_round_more_adds_one(played):
    assert sorted(played.records[2]) == [1, 2, 3]
    assert {number: played.records[2][number] for number in (1, 2)} == played.records[0]
    assert len(played.paid[2].sampled) == 8 * 3 + held_out_count(played)


def test_a_held_out_prompt_is_in_no_round(played):
    held_out = prompts_in(played.folder / "held-out" / "prompts.parquet")
    trained = prompts_in(played.folder / "prompts.parquet")
    assert held_out
    assert not held_out & trained
    for number in (1, 2, 3):
        one = RoundsFolder(played.folder).round(number)
        for path in (one.prompts, *one.samples.glob("*.parquet"), *one.selected.glob("*.parquet")):
            assert prompts_in(path) <= trained
        assert prompts_in(one.eval_samples / "samples.parquet") == held_out


def test_a_round_takes_the_prompts_that_no_round_had(played):
    slices = [prompts_in(RoundsFolder(played.folder).round(one).prompts) for one in (1, 2, 3)]
    assert [len(one) for one in slices] == [8, 8, 8]
    assert len(set().union(*slices)) == 24


def test_a_round_is_made_from_what_the_one_before_has_made(played):
    first, second, third = (record(played.folder, number) for number in (1, 2, 3))
    assert second["made_from"]["policy"] == first["made"]["model"]
    assert third["made_from"]["policy"] == second["made"]["model"]
    assert second["made_from"]["reference"] == first["made_from"]["policy"]
    assert len({one["made"]["model"] for one in (first, second, third)}) == 3


def test_a_round_against_the_beginning_is_against_the_policy_before_in_the_first(played):
    held_out = record(played.folder, 1)["held_out"]
    assert held_out["against_first"] == held_out["against_previous"]
    assert held_out["first"]["samples"] == held_out["policy"]["samples"] == held_out_count(played)


def test_the_plan_says_what_is_to_be_paid_before_anything_exists(played):
    held_out = held_out_count(played)
    lines = [line.split("  ") for line in played.planned.splitlines()]
    told = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["1", "sample", "0 of 24 samples", "24 samples"] in told
    assert ["1", "judge", "-", "at most 24 judgments"] in told
    assert ["1", "precompute-ref", "-", "at most 16 scores"] in told
    samples = f"{2 * held_out} samples, at most {2 * held_out} judgments"
    assert ["1", "evaluate", "-", samples] in told
    assert ["2", "evaluate", "-", f"{held_out} samples, at most {held_out} judgments"] in told


def test_the_plan_of_a_further_round_knows_the_finished_ones(played):
    told = play(played.path, "--count", 4, "--dry-run").out
    assert re.search(r"3 +all +finished +nothing", told)
    assert re.search(r"4 +sample +0 of 24 samples +24 samples", told)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample": {"temperature": 0.5}}, "sample.temperature: the round has 1.0, now 0.5"),
        ({"train": {"lr": 0.5}}, "train.lr: the round has 0.001, now 0.5"),
        ({"rounds": {"eval_fraction": 0.4}}, "held-out prompts: the round has"),
        ({"judge": {"function": "support.command:align"}}, "judge.source: the round has"),
    ],
)
def test_a_finished_round_with_other_settings_is_refused(played, world, tmp_path, changes, said):
    rounds = {**changes.get("rounds", {}), "output": str(played.folder)}
    path = write_settings(tmp_path, world, **{**changes, "rounds": rounds})
    message = refusal(4, "rounds", path)
    assert "Round 1 in" in message
    assert said in message


def test_a_model_that_its_round_has_not_left_is_refused(played, world, tmp_path):
    model = RoundsFolder(played.folder).round(3).run.model / "config.json"
    content = model.read_text()
    model.write_text(content.replace('"rms_norm_eps"', '"another_eps"'))
    try:
        assert "is not the model that round 3 has trained" in refusal(5, "rounds", played.path)
    finally:
        model.write_text(content)


def test_rounds_stop_where_the_win_rate_falls_below_the_bound(played, world, tmp_path):
    rate = record(played.folder, 1)["held_out"]["against_previous"]["rate"]
    rounds = {"output": str(played.folder), "min_win_rate": min(1.0, rate + 0.01), "count": 5}
    path = write_settings(tmp_path, world, rounds=rounds)
    for _ in range(2):  # the same command does not go on
        with counted() as paid:
            answer = play(path)
        assert answer.code == 0
        assert f"stopped after round 1: its win rate against the policy before is {rate:.3f}" in (
            answer.out
        )
        assert not paid.sampled
    assert 4 not in records(played.folder)


def test_the_page_has_text_only_where_it_is_asked_for(played, world, tmp_path):
    page = (played.folder / "rounds.html").read_text()
    prompt = sorted(prompts_in(played.folder / "held-out" / "prompts.parquet"))[0]
    shown = prompt.splitlines()[-2][:20]
    assert "Win rate" in page
    assert "Assistant:" not in page
    rounds = {"output": str(played.folder), "show_text": True}
    play(write_settings(tmp_path, world, rounds=rounds))
    page = (played.folder / "rounds.html").read_text()
    assert "Assistant:" in page
    assert shown


def test_rounds_that_learn_nothing_pay_for_nothing_twice(world, tmp_path):
    changes = {"rounds": {"prompts_per_round": 0, "eval_fraction": 0.8}, "train": {"lr": 0.0}}
    path = write_settings(tmp_path, world, **changes)
    with counted() as paid:
        answer = play(path)
    assert answer.code == 0, answer
    assert len(set(paid.sampled)) == len(paid.sampled)  # the policy of round 1 is the beginning
    assert re.search(r"scored 0 branches, reused (\d+) of \1", answer.err)


@dataclass(frozen=True)
class Compared:
    """One round whose judge compares, behind a server, recorded in MLflow."""

    folder: object
    uri: str
    asked: list


@pytest.fixture(scope="module")
def compared(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    uri = f"sqlite:///{folder}/mlflow.db"
    questions = []

    def answer_to(asked):
        questions.append(asked.last)
        return prefers_letters(asked.last)

    with chat_server(answer_to) as stub:
        path = write_settings(
            folder,
            world,
            sample={"n": 2},
            judge={"by": "pairwise", "function": ""},
            server={"url": stub.url, "model": "stub", "revision": "1"},
            tracking={"mlflow": True, "uri": uri},
            rounds={"count": 1, "prompts_per_round": 6},
        )
        answer = play(path)
        assert answer.code == 0, answer
    return Compared(folder / "out", uri, [one for one in questions if PARTS.search(one)])


def prefers_letters(question):
    """The verdict of a judge that counts different letters."""
    texts = PARTS.findall(question)
    if not texts:
        return "x"  # to a probe
    first, second = (len({letter for letter in text if letter.isalpha()}) for text in texts)
    return "Verdict: " + ("tie" if first == second else "A" if first > second else "B")


def test_a_judge_that_compares_is_shown_a_sample_of_each_policy(compared):
    held_out = record(compared.folder, 1)["held_out"]
    # In the first round the beginning is the policy before: no judgment of it is bought twice.
    assert held_out["against_first"] == held_out["against_previous"]
    assert held_out["policy"]["mean_score"] is None
    count = held_out["policy"]["samples"]
    assert held_out["against_first"]["comparisons"] == count > 0
    assert len(compared.asked) == len(set(compared.asked)) <= 2 * (6 + count)


def test_mlflow_has_a_run_for_the_rounds_and_one_for_each_verb_below_it(compared):
    client = open_store(compared.uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "align"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["align.stage"] == "rounds"]
    children = [run.data.tags for run in runs if run is not parent]
    stages = Counter(tags["align.stage"] for tags in children)
    # Samples of the round, of the beginning and of the policy; two comparisons with the judge.
    assert stages == {"sample": 3, "judge": 3, "select": 1, "precompute-ref": 1, "train": 1}
    held_out = [tags["align.stage"] for tags in children if "align.prompts" in tags]
    assert Counter(held_out) == {"sample": 2, "judge": 2}
    (select,) = [run for run in runs if run.data.tags["align.stage"] == "select"]
    assert select.data.tags["align.selected_root"] == record(compared.folder, 1)["made"]["selected"]
    tables = ("samples", "judged", "selected", "cache")
    tags = {name: of for one in children for name, of in one.items() if name != "align.round"}
    assert all(Path(tags[f"align.{name}"]).is_dir() for name in tables)
    assert all(len(tags[f"align.{name}_root"]) == 64 for name in tables)
    assert select.data.metrics["select/rows"] > 0
    assert {tags["mlflow.parentRunId"] for tags in children} == {parent.info.run_id}
    assert {tags["align.round"] for tags in children} == {"1"}
    made = record(compared.folder, 1)["made"]
    for name in ("samples", "judged", "selected", "cache", "model"):
        assert parent.data.tags[f"align.round-001.{name}"] == made[name]
    rate = record(compared.folder, 1)["held_out"]["against_first"]["rate"]
    assert parent.data.metrics["held_out/win_rate/first"] == pytest.approx(rate)
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {"rounds.html"}


# In the middle of a training, and in the second round when only its record is missing.
KILLS = ("step.updated=kill@2", "round.before_link=kill@2")


def test_rounds_that_are_killed_end_as_those_that_are_not(played, world, server, tmp_path):
    path = write_settings(tmp_path, world)
    for failpoint in KILLS:
        answer = server.run("rounds", path, failpoints=(failpoint,), cwd=tmp_path)
        assert answer.code == KILLED, answer
    assert server.run("rounds", path, cwd=tmp_path).code == 0
    assert records(tmp_path / "out") == played.records[0]


@pytest.mark.long
def test_rounds_that_are_killed_at_random_moments_end_as_those_that_are_not(
    played, world, server, tmp_path
):
    random, path, kills = Random(17), write_settings(tmp_path, world), 0
    answer = None
    while kills < 12:
        process = server.start("rounds", path, cwd=tmp_path)
        process.until("round " if not kills else "")
        time.sleep(random.uniform(0.0, 2.5))
        process.signal(signal.SIGKILL)
        (answer,) = process.answers()
        if answer.code == KILLED:
            kills += 1
        else:  # it was finished: another folder has to be begun
            assert answer.code == 0
            assert records(tmp_path / "out") == played.records[0]
            shutil.rmtree(tmp_path / "out")
    assert server.run("rounds", path, cwd=tmp_path).code == 0
    assert records(tmp_path / "out") == played.records[0]


@pytest.mark.long
@pytest.mark.parametrize("reference", ["fixed", "previous"])
def test_rounds_of_an_adapter_go_on_from_the_merged_model(world, server, tmp_path, reference):
    rounds = {"reference": reference}
    path = write_settings(tmp_path, world, lora={"enabled": True, "rank": 4}, rounds=rounds)
    answer = server.run("rounds", path, cwd=tmp_path)
    assert answer.code == 0, answer
    first, second = (record(tmp_path / "out", number) for number in (1, 2))
    assert second["made_from"]["policy"] == first["made"]["model"] != first["made_from"]["policy"]
    is_fixed = reference == "fixed"
    assert (second["made_from"]["reference"] == first["made_from"]["policy"]) == is_fixed
