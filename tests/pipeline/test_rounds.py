"""Rounds as a person gives them: what they pay for, once, and what they refuse."""

import json
from dataclasses import dataclass

import polars as pl
import pytest

from align.stages.storage.run.rounds_folder import RoundsFolder
from support.command import refusal
from support.rounds_play import counted, play, prompts_in, record, records, write_settings
from support.trainings import KILLED


@dataclass(frozen=True)
class Played:
    """Two rounds, the same command again, and one round more."""

    path: object
    folder: object
    answers: list
    paid: list
    records: list  # after each command

    @property
    def held_out(self):
        return prompts_in(self.folder / "held-out" / "prompts.parquet")

    def write(self, folder, world, **changes):
        """Settings of the same rounds, with changes."""
        rounds = {**changes.pop("rounds", {}), "output": str(self.folder)}
        return write_settings(folder, world, rounds=rounds, **changes)


@pytest.fixture(scope="module")
def played(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    path = write_settings(folder, world)
    answers, paid, left = [], [], []
    for words in ((), (), ("--count", 3)):
        with counted() as now:
            answers.append(play(path, *words))
        assert answers[-1].code == 0, answers[-1]
        paid.append(now)
        left.append(records(folder / "out"))
    return Played(path, folder / "out", answers, paid, left)


def test_every_sample_and_every_judgment_is_paid_once(played):
    first, again, more = played.paid
    # 8 prompts with 3 samples each in either round; held out: the beginning and two policies.
    held_out = len(played.held_out)
    assert held_out > 0
    assert len(first.sampled) == 2 * 8 * 3 + 3 * held_out
    assert first.judged <= len(first.sampled)
    # The same command again computes nothing and changes nothing, and one round more adds one.
    assert (again.sampled, again.judged) == ([], 0)
    assert played.records[1] == played.records[0]
    assert len(more.sampled) == 8 * 3 + held_out
    assert sorted(played.records[2]) == [1, 2, 3]
    assert played.records[0].items() < played.records[2].items()


def test_no_policy_of_a_finished_training_is_held_while_another_one_samples(played):
    # Of round 1, of the beginning and of policy 1 held out, of round 2, of policy 2 held out.
    assert played.paid[0].held == [0] * 5


def test_a_held_out_prompt_is_in_no_round_and_each_round_has_new_ones(played):
    trained, seen = prompts_in(played.folder / "prompts.parquet"), set()
    assert not played.held_out & trained
    for number in (1, 2, 3):
        one = RoundsFolder(played.folder).round(number)
        assert len(prompts_in(one.prompts)) == 8
        assert not seen & prompts_in(one.prompts)
        seen |= prompts_in(one.prompts)
        for path in (*one.samples.glob("*.parquet"), *one.selected.glob("*.parquet")):
            assert prompts_in(path) <= prompts_in(one.prompts)
        assert prompts_in(one.eval_samples / "samples.parquet") == played.held_out
    assert seen <= trained


def test_a_round_is_made_from_what_the_one_before_has_made(played):
    first, second, third = (record(played.folder, number) for number in (1, 2, 3))
    assert second["made_from"]["policy"] == first["made"]["model"]
    assert third["made_from"]["policy"] == second["made"]["model"]
    assert second["made_from"]["reference"] == first["made_from"]["policy"]
    assert len({one["made"]["model"] for one in (first, second, third)}) == 3
    held_out = first["held_out"]
    assert held_out["against_first"] == held_out["against_previous"]
    assert held_out["first"]["samples"] == held_out["policy"]["samples"] == len(played.held_out)


def test_a_policy_wins_where_its_score_is_above_that_of_the_policy_before(played):
    judged = [scores_in(RoundsFolder(played.folder).round(number).eval_judged) for number in (1, 2)]
    before, after = judged
    points = [(after[key] > before[key]) + (after[key] == before[key]) / 2 for key in after]
    assert points.count(0.5) < len(points)
    rate = record(played.folder, 2)["held_out"]["against_previous"]["rate"]
    assert rate == pytest.approx(sum(points) / len(points))


def scores_in(judged):
    rows = pl.read_parquet(judged / "judged.parquet", columns=["prompt_key", "number", "score"])
    return {(key, number): score for key, number, score in rows.iter_rows()}


def test_the_log_ratio_of_a_round_is_the_mean_of_both_sides(played):
    lines = RoundsFolder(played.folder).round(1).run.metrics.read_text().splitlines()
    last = [line for line in map(json.loads, lines) if "rewards/chosen" in line][-1]
    sides = last["rewards/chosen"], last["rewards/rejected"]
    log_ratio = sum(sides) / 2 / 0.1  # beta
    assert record(played.folder, 1)["trained"]["log_ratio"] == pytest.approx(log_ratio)


OTHERS = {
    ("sample.temperature", "1.0", "0.5"): {"sample": {"temperature": 0.5}},
    ("train.lr", "0.05", "0.5"): {"train": {"lr": 0.5}},
    ("held-out prompts",): {"rounds": {"eval_fraction": 0.4}},
    ("judge.source",): {"judge": {"function": "support.command:align"}},
}


def test_a_finished_round_with_other_settings_or_without_its_model_is_refused(
    played, world, tmp_path
):
    for names, changes in OTHERS.items():
        refusal(4, "rounds", played.write(tmp_path, world, **changes), names=("Round 1", *names))
    model = RoundsFolder(played.folder).round(3).run.model / "config.json"
    content = model.read_text()
    model.write_text(content.replace('"rms_norm_eps"', '"another_eps"'))
    try:
        refusal(5, "rounds", played.path, names=("round 3",))
    finally:
        model.write_text(content)


def test_rounds_stop_below_the_win_rate(played, world, tmp_path):
    made = {number: record(played.folder, number) for number in (1, 2, 3)}
    rates = {number: one["held_out"]["against_previous"]["rate"] for number, one in made.items()}
    number, rate = min(rates.items(), key=lambda each: each[1])
    rounds = {"min_win_rate": min(1.0, rate + 0.01), "count": 5}
    path = played.write(tmp_path, world, rounds=rounds)
    for _ in range(2):  # the same command does not go on
        with counted() as paid:
            answer = play(path)
        assert answer.code == 0
        assert f"round {number}" in answer.out
        assert f"{rate:.3f}" in answer.out
        assert not paid.sampled
    assert 4 not in records(played.folder)


# In the middle of a training, and in the second round when only its record is missing.
KILLS = ("after:update=kill@2", "before:link:round.json=kill@2")
# Before the nth change of the disk, a little later each time; the last is never reached.
MANY_KILLS = [f"before:*=kill@{number}" for number in range(3, 700, 11)]


@pytest.mark.parametrize(
    "places", [KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_rounds_that_are_killed_end_as_those_that_are_not(played, world, server, tmp_path, places):
    path, codes = write_settings(tmp_path, world), []
    for place in places:
        codes.append(server.run("rounds", path, faults=(place,), cwd=tmp_path).code)
        if codes[-1] == 0:
            break
    assert {*codes} <= {0, KILLED}
    assert codes.count(KILLED) >= min(5, len(places))
    assert server.run("rounds", path, cwd=tmp_path).code == 0
    assert records(tmp_path / "out") == played.records[0]
    # An answer that is stored is not sampled again.
    answers = RoundsFolder(tmp_path / "out").sample_answers.glob("*.jsonl")
    lines = [line for file in answers for line in file.read_bytes().splitlines()]
    assert len({*lines}) == len(lines) == len(played.paid[0].sampled)
