"""What a person sees of a run: its page, and the single completions behind its numbers."""

import csv
import html
import json
import re
import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from align.pipeline.train.run_diff import diff_runs, ranking
from align.pipeline.train.run_history import read_history
from align.pipeline.train.run_report import outcome, write_report
from align.schemas.checkpoint import RunEnding, RunIdentity
from align.schemas.errors import UsageError
from align.stages.report import eval_table
from align.stages.report.eval_table import COLUMNS, NAMES, REWARD
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.run.run_folder import ENDINGS, RunFolder
from support.command import success
from support.long_runs import write_long_run
from support.refusals import refuses, require_names


@pytest.fixture(scope="module")
def whole_run(course):
    """Of six steps, evaluated before, after the third and at its end."""
    return course.whole()


def lines_of(run, step):
    with RunFolder(run).evaluation(step).open(newline="") as source:
        return list(csv.DictReader(source))


def metrics_of(run, step):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if line["step"] == step and "eval/loss" in line)


def words_of(run):
    """The text of its page."""
    return html.unescape(re.sub(r"<[^>]*>", " ", (run / "report.html").read_text()))


def test_tables_of_evaluations_add_up(whole_run, course):
    rows = {row["row_id"]: row for row in pq.read_table(course.cache / "data").to_pylist()}
    assert list(RunFolder(whole_run).evaluations()) == [0, 3, 6]
    for step in (0, 3, 6):
        lines, metrics = lines_of(whole_run, step), metrics_of(whole_run, step)
        for role, name in (("desirable", "chosen"), ("undesirable", "rejected")):
            own = [line for line in lines if line["role"] in {role, name}]
            assert len(own) > 2
            mean = sum(float(line["logp"]) for line in own) / len(own)
            assert mean == pytest.approx(metrics[f"eval/logps/{name}"], abs=1e-9)
        assert len({line["prompt_key"] for line in lines}) > 1
        for line in lines:
            row = rows[line["row_id"]]
            assert line["prompt_key"] == bytes(row["prompt_key"]).hex()
            known = zip(map(len, row["completion_ids"]), map(str, row["ref_logp"]), strict=True)
            assert (int(line["tokens"]), line["reference_logp"]) in list(known)
            assert step or float(line["log_ratio"]) == pytest.approx(0, abs=1e-4)


def test_a_page_shows_the_whole_run_and_loads_nothing(whole_run, course):
    text, words = (whole_run / "report.html").read_text(), words_of(whole_run)
    assert not re.search(r"<(script|iframe|img|link)|(src|href)=|url\(|@import|https?://", text)
    assert "kto, 6 steps, finished." in words
    manifest = json.loads((course.cache / "manifest.json").read_text())
    before, after = (metrics_of(whole_run, step)["eval/loss"] for step in (0, 6))
    for shown in ("Loss", "Rewards", "KL", manifest["root"], manifest["inputs"][0]["sha256"]):
        assert shown in words
    assert f"loss {before:.4f} {after:.4f}" in " ".join(words.split())


def test_warnings_are_found_with_the_page_and_printed_at_the_end(whole_run, tmp_path):
    run = shutil.copytree(whole_run, tmp_path / "run")
    (run / "_align" / "ending.json").unlink()
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    kl = {"time": first["time"], "kl/raw": -3.0, "kl/clamped": 0.0}
    zeros = [{"step": step, **kl} for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in zeros))
    found = write_report(run)
    assert [*found] == ["KL at 0"]
    assert found["KL at 0"] in words_of(run)
    assert found["KL at 0"] in outcome(RunFolder(run), "finished", found).text()
    assert outcome(RunFolder(run), "finished").warnings == {}  # no table is read a second time


def test_a_run_with_a_merged_model_names_its_folder_first(tmp_path):
    folder = RunFolder(tmp_path)
    for model in (folder.model, folder.merged):
        model.mkdir()
    said = outcome(folder, "finished").text()
    (line,) = (one for one in said.splitlines() if one.startswith("model in "))
    assert line.split()[2] == str(folder.merged)
    assert f"{folder.model})" in line


def test_the_head_tells_a_run_from_others(whole_run, course, tmp_path):
    """The lines of a drawn run of 600 steps, 7 s each, are written in 70 min."""
    long = write_long_run(tmp_path / "run", steps=600, lr=2e-5, model="a/my-model/run").root
    write_report(long)
    for said in (
        "model my-model",
        "method kto",
        "first step 2026-11-18 11:06 UTC",
        "duration 1 h 10 min",
        "learning rate 2.0e-5",
        "beta 0.1",
        "rows in a step 64",
    ):
        assert said in " ".join(words_of(long).split())
    (data,) = json.loads((course.cache / "manifest.json").read_text())["inputs"]
    assert f"data {data['name'].partition('.')[0]} " in " ".join(words_of(whole_run).split())
    assert "--resume auto" not in words_of(whole_run)


def test_an_unfinished_run_says_why_and_what_to_do(tmp_path):
    folder = write_long_run(tmp_path / "run", steps=60, evaluated=2)
    known = RunEnding("failed", 60, 100, RunIdentity("", 1, 0, {}, {}), (), "lower <b>train.lr</b>")

    def said():
        write_report(folder.root)
        return words_of(folder.root)

    assert "60 steps, not finished" in said()
    assert "checkpoint of step" not in said()
    for step in (40, 20):
        folder.step(step).mkdir(parents=True)
    assert "checkpoint of step 40" in said()
    with owner_lock(folder.root, "another"):
        assert "locked" in said()
    folder.nonfinite.write_text('{"step": 60, "rank": 0}\n{"step": 59, "rank": 0}\n')
    ENDINGS.replace(folder.ending, known)
    require_names(said(), "60 steps, failed", "lower <b>train.lr</b>", "58 of 100")
    ENDINGS.replace(folder.ending, replace(known, ending="time", reason=""))
    assert "60 of 100" in said()


def test_a_page_shows_its_cache_and_steps_not_applied(whole_run, course, training_world, tmp_path):
    run, moved = shutil.copytree(whole_run, tmp_path / "run"), tmp_path / "moved"
    (run / "_align" / "ending.json").unlink()
    whole = [json.dumps({"step": step, "rank": 0, "row_ids": []}) for step in (7, 4, 7, 8)]
    glued = f'{{"step": 5, "ra{whole[0]}'
    (run / "nonfinite.jsonl").write_text("\n".join([glued, *whole, '{"step": 9, "ra']))
    shutil.copytree(course.cache, moved)
    root = json.loads((moved / "manifest.json").read_text())["root"]
    settings = (run / "config.yaml").read_text()
    for cache, said in ((moved, root), (training_world.pairs, f"cache {root}")):
        changed = settings.replace(str(course.cache), str(cache))
        (run / "config.yaml").write_text(changed)
        write_report(run)
        assert said in words_of(run)
        assert ("Lineage" in words_of(run)) == (cache == moved)
        assert "steps 7, 8 " in words_of(run)  # the fourth went well in the end


def test_a_table_or_a_page_that_cannot_be_written_costs_only_itself(course, tmp_path):
    run = tmp_path / "run"
    places = (
        "rename:evaluations/*.csv=enospc@2",
        "fsync:_align/rows/*=enospc",
        "rename:report.html=enospc",
    )
    full = ",".join(f"before:{place}" for place in places)
    answer = course.ends(0, run, fault=full)
    require_names(answer.err, "evaluations/", "_align/rows/0.jsonl", ".report.html")
    assert list(RunFolder(run).evaluations()) == [0, 6]
    assert metrics_of(run, 3)["eval/loss"] > 0
    assert (run / "model").exists()
    assert not (run / "report.html").exists()
    course.run(run, "--resume", "auto")
    assert "kto, 6 steps, finished." in words_of(run)


def test_a_table_that_fails_in_any_way_ends_no_run(training_world, tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise KeyError("token")

    monkeypatch.setattr(eval_table, "evaluation_csv", broken)
    words = ("--method", "dpo", "--cache", training_world.pairs, "--output", tmp_path / "run")
    success("train", *words, "--max-steps", 1, "--eval-fraction", 0.3, "--no-mlflow")
    assert sum("KeyError: 'token'" in one.getMessage() for one in caplog.records) == 2


def test_text_is_written_where_it_is_asked_for(whole_run, course, tmp_path, world):
    assert {"prompt", "completion"}.isdisjoint(lines_of(whole_run, 0)[0])
    course.run(
        tmp_path / "run",
        *("--method", "csft"),
        *("--max-steps", 1),
        *("--set", "train.eval_text=true"),
        *("--set", "train.eval_table=2"),
        *("--set", "train.row_margins=false"),
    )
    lines = lines_of(tmp_path / "run", 0)
    keys = {
        row["row_id"]: row["prompt_key"] for row in pq.read_table(course.cache / "data").to_pylist()
    }
    assert all(line["prompt_key"] == bytes(keys[line["row_id"]]).hex() for line in lines)
    assert {"reference_logp", "log_ratio"}.isdisjoint(lines[0])
    assert {line["row"] for line in lines} == {"0", "1"}
    rows = pq.read_table(world.data.paired).to_pylist()
    told = {(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")}
    for line in lines:  # csft writes a token of its own behind the prompt
        prompt = line["prompt"].removesuffix("<|good|>").removesuffix("<|bad|>")
        assert (prompt, line["completion"]) in told
    assert "log(policy / reference)" not in words_of(tmp_path / "run")


def with_margins(run, folder, margins):
    """A copy of a run whose last table has these margins of rewards, by the ids of rows."""
    path = RunFolder(shutil.copytree(run, folder)).evaluation(6)
    head = (*NAMES, *COLUMNS["log-ratios"], REWARD)
    with path.open("w", newline="") as sink:
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow(head)
        for number, (row_id, margin) in enumerate(margins.items()):
            for role, reward in (("chosen", margin), ("rejected", 0.0)):
                writer.writerow([number, row_id, row_id, role, 5, -1.0, -2.0, 1.0, reward])
    return folder


def test_two_runs_are_compared_by_the_rows_that_both_were_measured_on(whole_run, tmp_path):
    first = with_margins(whole_run, tmp_path / "a", {"x": -1.0, "y": 1.0, "z": 1.0})
    second = with_margins(whole_run, tmp_path / "b", {"x": 1.0, "y": -1.0, "z": 2.0})
    diff = diff_runs(first, second)
    found = diff.sets[""]
    assert (found.gained, found.lost, found.correct_in_both) == (("x",), ("y",), 1)
    for said in ("3 held-out rows", "A: y", "B: x", str(first)):
        assert said in diff.text()
    assert diff_runs(first, second, step=3).sets[""].gained == ()
    with refuses(UsageError, "0, 3, 6"):
        diff_runs(first, second, step=5)
    # Rewards of another beta are another measure: then log-ratios are compared.
    assert REWARD in diff.measure
    config = RunFolder(second).config
    config.write_text(config.read_text().replace("method: {}\n", "method:\n  beta: 0.5\n"))
    other = diff_runs(first, second)
    assert "log_ratio" in other.measure
    assert other.sets[""].accuracy.first != found.accuracy.first
    for table in RunFolder(second).evaluations().values():
        table.unlink()
    with refuses(UsageError, "eval-fraction"):
        diff_runs(first, second)


def test_what_was_measured_is_of_the_step_whose_model_was_written(whole_run, tmp_path):
    history = read_history(RunFolder(whole_run).metrics)
    for step in (3, 6):
        loss = metrics_of(whole_run, step)["eval/loss"]
        assert history.measured(None if step == 6 else step).after["eval/loss"] == loss
    assert history.measured(0).after == {}
    folder = RunFolder(shutil.copytree(whole_run, tmp_path / "run"))
    known = RunEnding("finished", 6, 6, RunIdentity("", 1, 0, {}, {}), (), model_step=3)
    ENDINGS.replace(folder.ending, known)
    after = outcome(folder, "finished").measured.after
    assert after["eval/loss"] == metrics_of(whole_run, 3)["eval/loss"]


def test_the_best_of_several_runs_is_named_with_those_that_may_be_as_good(whole_run, tmp_path):
    """Of 40 rows the best has 38 right, and another 18.

    One lacks 6 of these: by p = 0.03 two runs alone would differ, but four are six pairs.
    """
    names = {"far": 22, "near": 8, "top": 2, "twin": 2}
    folders = {}
    for name, wrong in names.items():
        margins = {f"r{number}": -1.0 if number < wrong else 1.0 for number in range(40)}
        folders[name] = RunFolder(with_margins(whole_run, tmp_path / name, margins))
    best, (top, alike, apart, *_) = ranking(folders)
    assert best == "top"
    require_names(top, "top", "twin", "0.95")
    assert ("near" in alike, "far" in alike) == (True, False)
    assert ("near" in apart, "far" in apart) == (False, True)
    assert "twin" not in alike + apart
    (alone, *_) = ranking({name: folders[name] for name in ("top", "near")})[1]
    assert ("top" in alone, "near" in alone) == (True, False)
    assert ranking({"top": folders["top"]}) == ("", ())
