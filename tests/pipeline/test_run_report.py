"""What a person sees of a run: its page, and the single completions behind its numbers."""

import csv
import json
import re
from html.parser import HTMLParser

import pyarrow.parquet as pq
import pytest
from command import refusal

from align.pipeline.run_report import write_report
from align.schemas.errors import UsageError
from align.stages.storage.run_folder import RunFolder


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
def run(course):
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


def test_every_evaluation_writes_its_completions_down(run):
    names = [path.name for path in RunFolder(run).evaluations()]
    assert names == [f"step-0000000{step}.csv" for step in (0, 3, 6)]


def test_they_add_up_to_what_was_measured(run):
    for step in (0, 3, 6):
        lines, metrics = lines_of(RunFolder(run).evaluation(step)), metrics_of(run, step)
        for role, name in (("desirable", "chosen"), ("undesirable", "rejected")):
            own = [line for line in lines if line["role"] in {role, name}]
            assert len(own) > 2
            mean = sum(float(line["logp"]) for line in own) / len(own)
            assert mean == pytest.approx(metrics[f"eval/logps/{name}"], abs=1e-9)


def test_each_is_a_completion_of_the_cache(run, course):
    stored = {row["row_id"]: row for row in pq.read_table(course.cache / "data").to_pylist()}
    for line in lines_of(RunFolder(run).evaluation(0)):
        row = stored[line["row_id"]]
        sizes_and_logps = list(
            zip(map(len, row["completion_ids"]), map(str, row["ref_logp"]), strict=True)
        )
        assert (int(line["tokens"]), line["reference_logp"]) in sizes_and_logps
        assert float(line["log_ratio"]) == pytest.approx(0, abs=1e-4)


def test_text_is_written_only_where_it_is_asked_for(run, with_text, world):
    assert "prompt" not in lines_of(RunFolder(run).evaluation(0))[0]
    lines = lines_of(RunFolder(with_text).evaluation(0))
    assert [line["row"] for line in lines] == ["0", "0", "1", "1"]
    rows = pq.read_table(world.data.paired).to_pylist()
    told = {(row["prompt"], row["chosen"]) for row in rows}
    told |= {(row["prompt"], row["rejected"]) for row in rows}
    assert {(line["prompt"], line["completion"]) for line in lines} <= told


def test_a_page_tells_the_whole_run_and_loads_nothing(run, course):
    text = (run / "report.html").read_text()
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
        "Good less bad completion of a row",
        "Log-ratio by length",
        "Data",
        "Lineage",
        "Settings",
    } <= set(words.titles)
    assert "kto, 6 steps, finished." in words.text
    manifest = json.loads((course.cache / "manifest.json").read_text())
    assert manifest["root"] in words.text
    assert manifest["inputs"][0]["sha256"] in words.text
    before, after = (metrics_of(run, step)["eval/loss"] for step in (0, 6))
    assert f"{before:.4g} → {after:.4g}" in words.text


def test_its_curves_are_drawn_of_every_step(run):
    text = (run / "report.html").read_text()
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


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no training run.*--output"):
        write_report(tmp_path)


def test_a_page_without_its_cache_says_so(run, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    config = (run / "config.yaml").read_text()
    cache = re.search(r"^  cache: (.*)$", config, re.MULTILINE)[1]
    (moved / "config.yaml").write_text(config.replace(cache, str(tmp_path / "gone")))
    (moved / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    write_report(moved)
    words = Words((moved / "report.html").read_text())
    assert str(tmp_path / "gone") in words.text
    assert "Lineage" not in words.titles
    assert "Held-out completions" not in words.titles


def test_steps_that_were_not_applied_are_named(run, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (moved / name).write_bytes((run / name).read_bytes())
    line = '{"step": 4, "rank": 0, "row_ids": []}\n'
    (moved / "nonfinite.jsonl").write_text(line * 2)
    write_report(moved)
    said = Words((moved / "report.html").read_text()).text
    assert "steps 4 were not applied" in said


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
    folder.drop_evaluations(after=3)
    assert folder.evaluations() == [folder.evaluation(0), folder.evaluation(3)]
    folder.drop_evaluations(after=-1)
    assert folder.evaluations() == []
