"""`align evaluate --tasks` with lm-evaluation-harness itself, on a task of a folder.

A command takes the harness half a minute of a CPU core, most of it to list the tasks that it has.
"""

import json

import pytest

from support.command import launch, success

TASK = """
task: even
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with one task; nothing is looked for elsewhere."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": f"Is {number} even?", "choices": ["Yes.", "No."], "label": number % 2}
        for number in range(6)
    ]
    (folder / "even.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "even.yaml").write_text(TASK.replace("DATA", str(folder / "even.jsonl")))
    return folder


def test_a_run_is_measured_on_a_task(tmp_path, tasks):
    world, cache, run = tmp_path / "world", tmp_path / "cache", tmp_path / "run"
    success("tiny-world", world, "--rows", 20)
    data = world / "data" / "paired.parquet"
    for words in (
        ("precompute-ref", data, "--model", world / "model", "--output", cache),
        ("train", "--method", "dpo", "--cache", cache, "--output", run, "--lora"),
    ):
        answer = launch(*words, "--no-mlflow", cwd=tmp_path)
        assert answer.code == 0, answer
    words = ("evaluate", run, "--harness", f"--include_path {tasks} --limit 4", "--device", "cpu")
    answer = launch(*words, "--tasks", "even", "--json", cwd=tmp_path)
    assert answer.code == 0, answer
    (found,) = json.loads(answer.out)["tasks"].items()
    (file,) = (run / "evaluated").glob("lm_eval_*.json")
    own = json.loads(file.read_text())
    values = own["results"]["even"]
    assert own["n-samples"]["even"]["effective"] == 4
    expected = {"acc": values["acc,none"], "acc_stderr": values["acc_stderr,none"]}
    assert found == ("even", {"metrics": expected, "intervals": {}})
    assert "| even: acc | " in (run / "model" / "README.md").read_text()
    missing = launch(*words, "--tasks", "odd", cwd=tmp_path)
    assert missing.code == 2
    assert "odd" in missing.err
