"""Which files become tables for MLflow's pages."""

import json

from align.stages.tracking.mlflow_tables import MAX_TAG, table_of, with_table


def test_completions_and_answers_are_tables_and_other_files_are_not(tmp_path):
    folder = tmp_path / "evaluations"
    folder.mkdir()
    completions = folder / "step-00000002.csv"
    completions.write_text("row_id,tokens,logp,completion\n007,3,-1.5,1\n008,4,nan,=a\n")
    assert table_of(completions) == {
        "columns": ["row_id", "tokens", "logp", "completion"],
        "data": [["007", 3.0, -1.5, "1"], ["008", 4.0, None, "=a"]],
    }
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"after":"c","before":"b","ended":true,"prompt":"a"}\n')
    columns = ["prompt", "before", "after", "ended"]
    assert table_of(answers) == {"columns": columns, "data": [["a", "b", "c", True]]}
    (tmp_path / "other.csv").write_text("a\n1\n")
    assert table_of(tmp_path / "other.csv") is None


def test_the_tag_names_each_table_once_and_the_newest_where_not_all_fit():
    tag = ""
    for step in [*range(300), 299]:
        tag = with_table(tag, f"evaluations/step-{step:08d}.json")
    assert len(tag) <= MAX_TAG
    named = [one["path"] for one in json.loads(tag)]
    assert len(set(named)) == len(named) > 20
    assert named[-1] == "evaluations/step-00000299.json"
