"""What a person sees of a run: its page, and the single completions behind its numbers."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser

import pyarrow.parquet as pq
import pytest

from align.pipeline.run_report import write_report
from align.pipeline.settings import signed
from align.schemas.errors import UsageError
from align.stages.storage.run_folder import RunFolder
from support.command import refusal


class Words(HTMLParser):
    """The text of a page, and the names of everything it would load."""

    def __init__(self, text):
        super().__init__()
        self.text, self.loads, self.titles, self._inside = "", [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.loads += [value for name, value in attrs if name in {"src", "href", "xlink:href"}]
        assert tag not in {"script", "iframe", "img", "link"}

    def handle_data(self, text):
        self.text += f"{text} "
        if self._inside in {"b", "h1", "h2", "summary"}:
            self.titles.append(text)


@pytest.fixture(scope="module")
def whole_run(course):
    """Of six steps, evaluated before, after the third and at its end."""
    return course.whole()


@pytest.fixture(scope="module")
def with_text(course, tmp_path_factory):
    """A run that writes down the text of two rows of every evaluation."""
    folder = tmp_path_factory.mktemp("text") / "run"
    sets = ("train.eval_text=true", "train.eval_table=2")
    course.run(folder, "--max-steps", 1, *(part for text in sets for part in ("--set", text)))
    return folder


def lines_of(path):
    with path.open(newline="") as source:
        return list(csv.DictReader(source))


def metrics_of(run, step):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if line["step"] == step and "eval/loss" in line)


def test_every_evaluation_writes_its_completions_down(whole_run):
    assert RunFolder(whole_run).evaluations() == {
        step: whole_run / "evaluations" / f"step-0000000{step}.csv" for step in (0, 3, 6)
    }


def test_they_add_up_to_what_was_measured(whole_run):
    for step in (0, 3, 6):
        lines, metrics = (
            lines_of(RunFolder(whole_run).evaluation(step)),
            metrics_of(whole_run, step),
        )
        for role, name in (("desirable", "chosen"), ("undesirable", "rejected")):
            own = [line for line in lines if line["role"] in {role, name}]
            assert len(own) > 2
            mean = sum(float(line["logp"]) for line in own) / len(own)
            assert mean == pytest.approx(metrics[f"eval/logps/{name}"], abs=1e-9)


def test_each_is_a_completion_of_the_cache(whole_run, course):
    stored = {row["row_id"]: row for row in pq.read_table(course.cache / "data").to_pylist()}
    for line in lines_of(RunFolder(whole_run).evaluation(0)):
        row = stored[line["row_id"]]
        sizes_and_logps = list(
            zip(map(len, row["completion_ids"]), map(str, row["ref_logp"]), strict=True)
        )
        assert (int(line["tokens"]), line["reference_logp"]) in sizes_and_logps
        assert float(line["log_ratio"]) == pytest.approx(0, abs=1e-4)


def test_text_is_written_only_where_it_is_asked_for(whole_run, with_text, world):
    assert "prompt" not in lines_of(RunFolder(whole_run).evaluation(0))[0]
    lines = lines_of(RunFolder(with_text).evaluation(0))
    assert [line["row"] for line in lines] == ["0", "0", "1", "1"]
    rows = pq.read_table(world.data.paired).to_pylist()
    told = {(row["prompt"], row["chosen"]) for row in rows}
    told |= {(row["prompt"], row["rejected"]) for row in rows}
    assert {(line["prompt"], line["completion"]) for line in lines} <= told


def test_a_page_shows_the_whole_run_and_loads_nothing(whole_run, course):
    text = (whole_run / "report.html").read_text()
    words = Words(text)
    assert words.loads == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert {
        "whole-0",
        "Learning",
        "Loss",
        "Accuracy",
        "Rewards",
        "KL, mean of mismatched log-ratios",
        "Held-out completions",
        "Log-ratios of completions",
        "Margins of rewards within a row",
        "Log-ratios by length",
        "Data",
        "Lineage",
        "Settings",
    } <= set(words.titles)
    assert "kto, 6 steps, finished." in words.text
    manifest = json.loads((course.cache / "manifest.json").read_text())
    assert manifest["root"] in words.text
    assert manifest["inputs"][0]["sha256"] in words.text
    before, after = (metrics_of(whole_run, step)["eval/loss"] for step in (0, 6))
    assert f"{before:.4g} → {after:.4g}" in words.text


def test_its_curves_are_drawn_of_every_step(whole_run):
    text = (whole_run / "report.html").read_text()
    figure = text[text.index("<b>Learning rate</b>") :]
    line = re.search(r'<polyline class="c0 line" points="([^"]*)"', figure)
    assert len(line[1].split()) == 6


def test_an_unfinished_run_can_be_looked_at(course, tmp_path, server):
    run = tmp_path / "run"
    answer = course.start(run, failpoints=["model.before_rename=kill@1"]).answers()[0]
    assert answer.code != 0
    assert not (run / "report.html").exists()
    assert server.run("report", run).out.startswith(f"{run}/report.html written")
    assert "kto, 6 steps, not finished." in Words((run / "report.html").read_text()).text


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no training run.*--output"):
        write_report(tmp_path)


def settings(run):
    """The text of a run's settings without the line that vouches for it."""
    return (run / "config.yaml").read_text().partition("\n")[2]


def test_a_page_without_its_cache_says_so(whole_run, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    config = settings(whole_run)
    cache = re.search(r"^  cache: (.*)$", config, re.MULTILINE)[1]
    (moved / "config.yaml").write_bytes(signed(config.replace(cache, str(tmp_path / "gone"))))
    (moved / "metrics.jsonl").write_bytes((whole_run / "metrics.jsonl").read_bytes())
    write_report(moved)
    words = Words((moved / "report.html").read_text())
    assert str(tmp_path / "gone") in words.text
    assert "Lineage" not in words.titles
    assert "Held-out completions" not in words.titles


def test_steps_that_were_not_applied_are_named(whole_run, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (moved / name).write_bytes((whole_run / name).read_bytes())
    whole = [json.dumps({"step": step, "rank": 0, "row_ids": []}) for step in (7, 4, 7, 8)]
    (moved / "nonfinite.jsonl").write_text("\n".join([*whole, '{"step": 9, "ra']))
    write_report(moved)
    said = Words((moved / "report.html").read_text()).text
    assert "steps 7, 8 were not applied" in said  # the fourth went well in the end


def test_a_run_whose_page_cannot_be_written_is_finished_all_the_same(course, tmp_path):
    run = tmp_path / "run"
    (answer,) = course.start(run, failpoints=["report.before_rename=enospc"]).answers()
    assert answer.code == 0
    assert "No report: " in answer.err
    assert (run / "model").exists()
    assert not (run / "report.html").exists()
    course.run(run, "--resume", "auto")
    assert "kto, 6 steps, finished." in Words((run / "report.html").read_text()).text


def test_a_table_that_cannot_be_written_costs_only_itself(course, tmp_path):
    run = tmp_path / "run"
    (answer,) = course.start(run, failpoints=["evaluation.before_rename=enospc@2"]).answers()
    assert answer.code == 0
    assert "No table of single completions: " in answer.err
    assert list(RunFolder(run).evaluations()) == [0, 6]
    assert metrics_of(run, 3)["eval/loss"] > 0


def test_a_page_never_shows_another_cache(whole_run, course, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(whole_run, moved)
    other = tmp_path / "other"
    shutil.copytree(course.cache, other)
    root = json.loads((other / "manifest.json").read_text())["root"]
    config = settings(moved).replace(str(course.cache), str(other))
    (moved / "config.yaml").write_bytes(signed(config))
    (moved / "_align" / "ending.json").unlink()
    write_report(moved)
    assert "Lineage" in Words((moved / "report.html").read_text()).titles
    shutil.rmtree(other)
    again = ("--model", course.model, "--kl-pairs", 0, "--no-mlflow", "--output", other)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "Why?", "chosen": "So.", "rejected": "No."}) + "\n")
    assert course.server.run("precompute-ref", data, *again).code == 0
    write_report(moved)
    words = Words((moved / "report.html").read_text())
    assert f"This run was trained on root {root}." in words.text
    assert "Lineage" not in words.titles


def test_a_run_that_ends_by_the_time_has_its_page(course, tmp_path):
    run = tmp_path / "run"
    course.run(run, "--max-steps", 1)
    longer = ("--resume", "auto", "--epochs", 1000, "--max-steps", 0)
    course.run(run, *longer, "--max-time", "1s")
    assert "not finished" in Words((run / "report.html").read_text()).text


def test_words_the_reference_never_saw_have_no_log_ratio(course, tmp_path):
    run = tmp_path / "run"
    course.run(run, "--method", "csft", "--max-steps", 1)
    (first, *_) = lines_of(RunFolder(run).evaluation(0))
    assert list(first) == ["row", "row_id", "role", "tokens", "logp"]
    words = Words((run / "report.html").read_text())
    assert "Log-probs of completions" in words.titles
    assert "log(policy / reference)" not in words.text


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("train.eval_text=true", "train.eval_fraction=0"), "no rows are held out"),
        (("train.eval_text=true", "train.eval_table=0"), "train.eval_table is 0"),
    ],
)
def test_text_of_nothing_is_refused(course, tmp_path, sets, said):
    more = [part for text in sets for part in ("--set", text)]
    assert said in refusal(2, *course.arguments(tmp_path / "run", *more))


def test_given_up_evaluations_are_removed(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "evaluations").mkdir()
    for step in (0, 3, 6):
        folder.evaluation(step).write_text("")
    (tmp_path / "evaluations" / "step-notes.csv").write_text("mine")
    folder.drop_evaluations(after=3)
    assert list(folder.evaluations()) == [0, 3]
    folder.drop_evaluations(after=-1)
    assert not folder.evaluations()
    assert (tmp_path / "evaluations" / "step-notes.csv").exists()
