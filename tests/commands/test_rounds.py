"""Rounds as a person gives them: what they pay for, once, and what they refuse."""

from dataclasses import dataclass

import polars as pl
import pytest

from align.pipeline.train.run_history import read_history
from align.stages.storage.run.run_folder import RunFolder
from support.command import refusal, success
from support.families import saved_adapter
from support.rounds_play import counted, damage, lines_of, prompts_in, write_settings
from support.trainings import KILLED


@dataclass(frozen=True)
class Played:
    """Two rounds, the same command again, and one round more."""

    path: object
    folder: object
    paid: list
    lines: list  # after each command

    @property
    def held_out(self):
        return prompts_in(self.folder / "held-out.parquet")

    def write(self, folder, world, **changes):
        """Settings of the same rounds, with changes."""
        rounds = {**changes.pop("rounds", {}), "output": str(self.folder)}
        return write_settings(folder, world, rounds=rounds, **changes)


@pytest.fixture(scope="module")
def played(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    path = write_settings(folder, world)
    paid, left = [], []
    for words in ((), (), ("--count", 3)):
        with counted() as now:
            success("rounds", path, *words)
        paid.append(now)
        left.append(lines_of(folder / "out"))
    return Played(path, folder / "out", paid, left)


def test_every_sample_and_every_judgment_is_paid_once(played):
    first, again, more = played.paid
    # 8 prompts with 3 samples each in either round; held out: the beginning and two policies.
    held_out = len(played.held_out)
    assert held_out > 0
    assert len(first.sampled) == 2 * 8 * 3 + 3 * held_out
    assert first.judged <= len(first.sampled)
    # The same command again computes nothing and changes nothing, and one round more adds one.
    assert (again.sampled, again.judged) == ([], 0)
    assert played.lines[1] == played.lines[0]
    assert len(more.sampled) == 8 * 3 + held_out
    assert [line["round"] for line in played.lines[2]] == [0, 1, 2, 3]
    assert played.lines[2][:3] == played.lines[0]
    # No policy of a finished training is in memory while another one samples.
    assert first.held == [0] * 5


def test_an_adapter_of_the_first_model_is_merged_into_the_policy(world, tmp_path):
    adapter = saved_adapter(tmp_path / "adapter", world.model)
    model = {"adapter": str(adapter)}
    path = write_settings(tmp_path, world, model=model, rounds={"count": 1, "output": "out"})
    success("rounds", path)
    trained = tmp_path / "out" / "round-001" / "run" / "model"
    assert {one.name for one in trained.glob("*.safetensors")} == {"model.safetensors"}


def test_a_held_out_prompt_is_in_no_round_and_each_round_has_new_ones(played):
    trained, seen = prompts_in(played.folder / "prompts.parquet"), set()
    assert not played.held_out & trained
    for number in (1, 2, 3):
        folder = played.folder / f"round-{number:03d}"
        own = prompts_in(folder / "prompts.parquet")
        assert len(own) == 8
        assert not seen & own
        seen |= own
        for name in ("samples", "selected"):
            assert prompts_in(folder / name / f"{name}.parquet") <= own
        assert prompts_in(folder / "eval-samples" / "samples.parquet") == played.held_out
    assert seen <= trained


def test_a_policy_wins_where_its_score_is_above_that_of_the_policy_before(played):
    lines = played.lines[2]
    assert len({line["model"] for line in lines}) == 4
    first = lines[1]["metrics"]
    assert first["held_out/win_rate/first"] == first["held_out/win_rate/previous"]
    assert first["held_out/samples"] == len(played.held_out)
    scores = []
    for number in (1, 2):
        table = played.folder / f"round-{number:03d}" / "eval-judged" / "judged.parquet"
        rows = pl.read_parquet(table, columns=["prompt_key", "number", "score"]).iter_rows()
        scores.append({(key, number): score for key, number, score in rows})
    before, after = scores
    points = [(after[key] > before[key]) + (after[key] == before[key]) / 2 for key in after]
    assert points.count(0.5) < len(points)
    rate = lines[2]["metrics"]["held_out/win_rate/previous"]
    assert rate == pytest.approx(sum(points) / len(points))


def test_a_line_of_a_round_has_the_last_metrics_of_its_training(played):
    for line in played.lines[2][1:]:
        run = played.folder / f"round-{line['round']:03d}" / "run"
        last = read_history(RunFolder(run).metrics).learned.row(-1, named=True)
        told = {name for name in line["metrics"] if name.startswith("train/")}
        assert {"train/loss", "train/rewards/margins", "train/rewards/ties"} <= told
        for name in told:
            assert line["metrics"][name] == last[name.removeprefix("train/")]


OTHERS = {
    ("sample.temperature", "1.0", "0.5"): {"sample": {"temperature": 0.5}},
    ("train.lr", "0.05", "0.5"): {"train": {"lr": 0.5}},
    ("held-out prompts",): {"rounds": {"eval_fraction": 0.4}},
    ("judge.source",): {"judge": {"function": "support.command:align"}},
}


def test_rounds_of_other_settings_are_refused(played, world, tmp_path):
    for names, changes in OTHERS.items():
        refusal(4, "rounds", played.write(tmp_path, world, **changes), names=names)
    model = played.folder / "round-003" / "run" / "model" / "config.json"
    content = model.read_text()
    model.write_text(content.replace('"rms_norm_eps"', '"another_eps"'))
    try:
        refusal(5, "rounds", played.path, names=(model.parent,))
    finally:
        model.write_text(content)


# What goes wrong in turn, each after more was paid for, and the correction of it.
CORRECTED = [
    ({"judge": {"function": "builtins:len"}}, ("builtins:len",)),
    ({"select": {"keep_cut": False}}, ("--keep-cut",)),
    ({"train": {"desirable_share": 0.5}}, ("train.desirable_share",)),
]


def test_settings_may_be_corrected_until_a_training_has_saved_something(world, tmp_path):
    rounds = {"count": 1, "output": str(tmp_path / "out")}
    short = {"sample": {"max_new_tokens": 2}, "rounds": rounds}
    with counted() as paid:
        for changes, names in CORRECTED:
            refusal(2, "rounds", write_settings(tmp_path, world, **short, **changes), names=names)
        path = write_settings(tmp_path, world, **short, select={"rows": "all_pairs"})
        success("rounds", path)
    held_out = len(prompts_in(tmp_path / "out" / "held-out.parquet"))
    assert len({*paid.sampled}) == 8 * 3 + held_out
    assert len(paid.sampled) == 8 * 3 + 2 * held_out  # of two policies

    # The training is done, and its round is not.
    lines = tmp_path / "out" / "rounds.jsonl"
    lines.write_text(lines.read_text().splitlines(keepends=True)[0])
    run = tmp_path / "out" / "round-001" / "run"
    refusal(4, "rounds", write_settings(tmp_path, world, **short), names=("select.rows", run))


@pytest.mark.parametrize("name", ["rounds.json", "rounds.jsonl"])
def test_a_changed_number_in_what_rounds_keep_is_damage(played, name):
    path = played.folder / name
    content = path.read_text()
    place = content.index("0.")
    path.write_text(f"{content[:place]}9{content[place + 1 :]}")
    try:
        refusal(5, "rounds", played.path, names=(path,))
    finally:
        path.write_text(content)


def test_a_damaged_table_of_samples_is_made_again(played):
    before = damage(played.folder)
    with counted() as paid:
        success("rounds", played.path, "--count", 3)
    assert [(path, path.read_bytes()) for path, _ in before] == before
    assert not paid.sampled


def test_rounds_stop_below_the_win_rate(played, world, tmp_path):
    rates = [line["metrics"]["held_out/win_rate/previous"] for line in played.lines[2][1:]]
    rate = min(rates)
    rounds = {"min_win_rate": min(1.0, rate + 0.01), "count": 5}
    path = played.write(tmp_path, world, rounds=rounds)
    for _ in range(2):  # the same command does not go on
        with counted() as paid:
            answer = success("rounds", path)
        assert "rounds.min_win_rate" in answer.out
        assert f"{rate:.3f}" in answer.out
        assert not paid.sampled
    assert len(lines_of(played.folder)) == 4


@pytest.mark.long
def test_rounds_that_are_killed_end_as_those_that_are_not(played, world, server, tmp_path):
    """Before the nth change of the disk, a little later each time; the last is never reached."""
    path, codes = write_settings(tmp_path, world), []
    for number in range(3, 700, 11):
        place = f"before:*=kill@{number}"
        codes.append(server.run("rounds", path, faults=(place,), cwd=tmp_path).code)
        if codes[-1] == 0:
            break
    assert {*codes} <= {0, KILLED}
    assert codes.count(KILLED) > 4
    server.success("rounds", path, cwd=tmp_path)
    assert lines_of(tmp_path / "out") == played.lines[0]
    # An answer that is stored is not sampled again.
    answers = (tmp_path / "out" / "answers" / "samples").glob("*.jsonl")
    lines = [line for file in answers for line in file.read_bytes().splitlines()]
    assert len({*lines}) == len(lines) == len(played.paid[0].sampled)
