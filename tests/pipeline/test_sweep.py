"""Many runs over one cache: which ones are made, and what is left of them."""

import json

import pytest
from command import align, refusal
from mlflow.tracking import MlflowClient

from align.pipeline.settings import parse_varied
from align.pipeline.sweep import trials_of
from align.schemas.errors import UsageError


def names(methods, **varied):
    return [trial.name for trial in trials_of(methods, varied)]


def test_every_combination_is_one_run():
    varied = {"method.beta": ["0.05", "0.1"], "train.lr": ["1e-6", "1e-5"]}
    assert names(["dpo"], **varied) == [
        "dpo-0.05-1e-6",
        "dpo-0.05-1e-5",
        "dpo-0.1-1e-6",
        "dpo-0.1-1e-5",
    ]


def test_an_option_that_a_method_does_not_have_is_left_out_for_it():
    varied = {"method.beta": ["0.05", "0.1"]}
    assert names(["dpo", "orpo"], **varied) == ["dpo-0.05", "dpo-0.1", "orpo"]
    trials = trials_of(["dpo", "orpo"], varied)
    assert trials[1].settings == ("train.method=dpo", "method.beta=0.1")
    assert trials[2].settings == ("train.method=orpo",)


def test_an_option_that_no_method_has_is_refused():
    with pytest.raises(UsageError, match=r"method\.bta: none of dpo, kto has it"):
        trials_of(["dpo", "kto"], {"method.bta": ["1"]})


@pytest.mark.parametrize("text", ["method.beta", "=1", "method.beta=", "method.beta=1,,2"])
def test_values_to_vary_have_a_name_and_none_is_empty(text):
    with pytest.raises(UsageError, match="expected SETTING=V1,V2"):
        parse_varied([text])


@pytest.fixture(scope="module")
def swept(journey, tmp_path_factory):
    """Two good runs and one that fails, on a cache made by one command."""
    folder = tmp_path_factory.mktemp("swept")
    settings = ["train.max_steps=1", "train.eval_fraction=0.2", "train.batch_size=8"]
    store = f"tracking.uri=sqlite:///{folder}/mlflow.db"
    answer = align(
        "sweep",
        *("--method", "dpo", "--method", "orpo", "--beta", "0.1,-1"),
        *("--cache", journey.cache, "--output", folder / "sweep"),
        *(part for text in [*settings, store] for part in ("--set", text)),
    )
    return folder, answer


def test_a_run_that_fails_is_told_and_the_others_are_made(swept):
    folder, answer = swept
    assert answer.code == 2, answer
    assert "1 of 3 runs failed" in answer.err
    assert "dpo--1 failed: " in answer.out
    assert "beta" in answer.out
    made = json.loads((folder / "sweep" / "sweep.json").read_text())
    assert [(one["name"], bool(one["failure"])) for one in made] == [
        ("dpo-0.1", False),
        ("dpo--1", True),
        ("orpo", False),
    ]
    for one in made:
        if not one["failure"]:
            assert one["before"]["eval/loss"] != one["after"]["eval/loss"]
            assert (folder / "sweep" / one["name"] / "model" / "config.json").is_file()


def test_runs_are_nested_below_the_sweep(swept):
    folder, _ = swept
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("align").experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("align.stage") == "sweep"]
    children = [run for run in runs if run.data.tags.get("align.stage") == "train"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert sorted(run.data.tags["align.method"] for run in children) == ["dpo", "orpo"]
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert "sweep.json" in [file.path for file in client.list_artifacts(parent.info.run_id)]


def test_a_sweep_of_an_unknown_method_ends_before_anything_is_trained(journey, tmp_path):
    said = refusal(2, "sweep", "--method", "dpoo", "--cache", journey.cache)
    assert "Did you mean" in said
