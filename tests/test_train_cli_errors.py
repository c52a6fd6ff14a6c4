"""What a person gets wrong with `align train`: one message, before anything slow is done."""

import shutil
import sys

import pytest

from support import trainings
from support.command import refusal

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def refused(course, monkeypatch):
    """Gives a command that must be refused by what is known before ranks meet."""

    def said(*arguments):
        words = ("train", "--cache", course.cache, "--method", "dpo", *arguments)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "align.pipeline.train.train", None)  # its import would fail
            return refusal(2, *words)

    return said


# What is given by --set for a method, and what is said.
SETTINGS = {
    "dp": "no such method. Did you mean 'dpo'",
    "dpo method.bta=0.1": "'method.bta'. Did you mean 'beta'?",
    "dpo method.beta=.nan": "method.beta is nan",
    "dpo train.max_time=90": "train.max_time is '90'; expected a time such as 3h30m",
    "dpo train.eval_fraction=0.1 train.eval_cache=x": "eval_cache and train.eval_fraction are",
    "dpo lora.merge=true": "lora.merge is set, but no adapter is trained",
    "dpo lora.enabled=true lora.dropout=0.3": "train.dropout is off",
    "dpo train.schedule=constant train.min_lr=0.1": "a constant schedule never",
    "dpo train.eval_text=true": "no rows are held out",
    "dpo train.best=-eval/loss": "no rows are held",
    "dpo train.patience=2": "train.patience is set, and train.best is not",
    "dpo train.write_best=true": "train.write_best is set, and train.best is not",
    "dpo train.patience=2 train.best=grad_norm": "counts evaluations on held-out rows",
    "dpo train.desirable_share=0.5": "are for methods that read labels",
    "dpo train.best=eval/loss train.eval_fraction=0.1 train.eval_every=4 train.write_best=true "
    "train.save_every=3": "needs a checkpoint of every evaluation",
    "kto train.label_threshold=.inf": "expected mean, median or a number",
    "csft method.good_token=x method.bad_token=x": "are empty or alike",
    "kto+csft": "csft shows the policy other prompts",
    "dpo method.ld_alpha=0.5": "precompute-ref … --token-logps --output OTHER`",
    "grpo": "needs the reference's log-prob of every token",
}


def test_an_impossible_setting_is_named(refused, course):
    for given, said in SETTINGS.items():
        method, *settings = given.split()
        words = [word for one in settings for word in ("--set", one)]
        assert said in refused("--method", method, *words), given
    assert "--method kto (or dpo, orpo" in refusal(2, "train", "--cache", course.cache)


def test_a_cache_that_is_not_there_or_not_finished_and_a_policy_that_is_none(course, refused, here):
    shutil.copytree(course.cache, here / "half")
    (here / "half" / "manifest.json").unlink()
    for name in ("nowhere", "half"):
        said = refused("--cache", name)
        assert f"{name} is not a finished cache" in said
        assert "`align precompute-ref`" in said
    assert "/nowhere: no such model folder" in refused("--model", "/nowhere")
    shutil.copytree(course.model, here / "bare")
    (here / "bare" / "model.safetensors").unlink()
    assert "bare: there is no model.safetensors" in refused("--model", "bare")


def test_a_deepspeed_file_that_cannot_be_is_refused_where_it_is_written(refused, here):
    project = here / "project"
    project.mkdir()
    (project / "align.yaml").write_text("train:\n  deepspeed: ds.json\n")
    (here / "ds.json").write_text("{}")  # beside the person, not beside the settings
    for content, said in (
        ("{", "ds.json: not readable as JSON"),
        ('{"train_batch_size": 7}', "7 in the file, 64 here (train.batch_size)"),
    ):
        (project / "ds.json").write_text(content)
        assert said in refused("--config", project / "align.yaml"), content
    assert "Did you mean 'zero3'?" in refused("--deepspeed", "zero33")


def test_a_method_whose_rows_or_pairs_the_cache_does_not_hold(course, world, here):
    cache = here / "unpaired"
    made = ("--model", course.model, "--output", cache, "--kl-pairs", 0, "--no-mlflow")
    assert course.server.run("precompute-ref", world.data.unpaired, *made).code == 0
    said = trainings.refused(course, 2, here / "run", "--cache", cache, "--method", "dpo")
    assert "The method is paired" in said
    assert "unpaired (a completion and its label)" in said
    said = trainings.refused(course, 2, here / "run", "--cache", cache, "--method", "kto")
    assert "mismatched completions" in said
    assert "--kl-pairs 1" in said


def test_a_folder_of_something_else_is_refused(course, here):
    (here / "photos").mkdir()
    (here / "photos" / "me.jpg").touch()
    assert "photos holds 'me.jpg'" in trainings.refused(course, 2, here / "photos")
