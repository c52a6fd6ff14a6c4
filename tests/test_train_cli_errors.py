"""What a person gets wrong with `align train`: one message, before anything slow is done."""

import shutil
import sys

import pytest

from support.command import refusal

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def refused(course, monkeypatch):
    """Gives a command that must be refused by what is known before ranks meet."""

    def said(*arguments):
        words = ("train", "--cache", course.cache, "--method", "dpo", *arguments)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "align.pipeline.train", None)  # its import would fail
            return refusal(2, *words)

    return said


@pytest.fixture(scope="module")
def unpaired_cache(course, world):
    """A cache of labelled completions, without mismatched ones."""
    cache = course.folder / "unpaired"
    data = ("--model", course.model, "--output", cache, "--kl-pairs", 0, "--no-mlflow")
    answer = course.server.run("precompute-ref", world.data.unpaired, *data)
    assert answer.code == 0, answer
    return cache


def refused_by_all(course, code, *arguments, ranks=1):
    """Gives a command that every rank must refuse with the same message."""
    answers = course.start(*arguments, ranks=ranks).answers()
    assert [answer.code for answer in answers] == [code] * ranks, answers
    messages = {answer.err.partition("error: ")[2] for answer in answers}
    assert len(messages) == 1, answers
    assert "Traceback" not in "".join(answer.out + answer.err for answer in answers)
    return messages.pop()


def test_a_method_that_is_missing_or_unknown(course):
    assert "--method kto (or dpo, orpo" in refusal(2, "train", "--cache", course.cache)
    for name, near in (("dp", "dpo"), ("KTO", "kto"), ("simp", "simpo"), ("dpo2", "dpo")):
        said = refusal(2, "train", "--cache", course.cache, "--method", name)
        assert f"method '{name}': no such method. Did you mean '{near}'" in said


def test_an_impossible_setting_is_named(refused):
    for given, said in (
        ("method.bta=0.1", "'method.bta'. Did you mean 'beta'?"),
        ("method.beta=much", "method.beta"),
        ("method.beta=-1", "method.beta: expected a number above 0, found -1"),
        ("method.beta=.nan", "method.beta is nan"),
        ("train.bath_size=8", "'train.bath_size'. Did you mean 'batch_size'?"),
        ("train.batch_size=0", "train.batch_size: expected a whole number of at least 1, found 0"),
        ("train.schedule=cosin", "train.schedule"),
        ("train.max_time=soon", "train.max_time is 'soon'; expected a time such as 3h30m"),
        ("train.max_time=90", "train.max_time is '90'; expected a time such as 3h30m"),
        ("train.eval_fraction=1.5", "train.eval_fraction: expected a number of at least 0 and at"),
    ):
        assert said in refused("--set", given), given


def test_a_cache_that_is_not_there_or_not_finished(course, here):
    shutil.copytree(course.cache, here / "half")
    (here / "half" / "manifest.json").unlink()
    for name in ("nowhere", "half"):
        said = refusal(2, "train", "--method", "dpo", "--cache", name)
        assert f"{name} is not a finished cache" in said
        assert "`align precompute-ref`" in said


def test_two_ways_to_evaluate(course, refused):
    said = refused("--eval-fraction", "0.1", "--set", f"train.eval_cache={course.cache}")
    assert "train.eval_cache and train.eval_fraction are both set" in said


def test_a_deepspeed_file_that_cannot_be_is_refused_before_a_model_is_loaded(refused, here):
    for content, said in (
        ("{", "ds.json: not readable as JSON"),
        ('{"optimizer": {"params": {"lr": 0.5}}}', "0.5 in the file, 1e-06 here (train.lr)"),
        ('{"train_batch_size": 7}', "7 in the file, 64 here (train.batch_size)"),
        ('{"bf16": {"enabled": true}}', "True in the file, False here (train.dtype)"),
    ):
        (here / "ds.json").write_text(content)
        assert said in refused("--deepspeed", "ds.json"), content
    assert "Did you mean 'zero3'?" in refused("--deepspeed", "zero33")


def test_a_policy_that_is_none(refused, here, course):
    assert "/nowhere: no such model folder" in refused("--model", "/nowhere")
    shutil.copytree(course.model, here / "bare")
    (here / "bare" / "model.safetensors").unlink()
    assert "bare: there is no model.safetensors" in refused("--model", "bare")


def test_a_reference_that_was_moved_away(course, here, world):
    shutil.copytree(course.model, here / "model")
    made = ("--model", here / "model", "--output", here / "cache", "--no-mlflow")
    assert course.server.run("precompute-ref", world.data.paired, *made).code == 0
    (here / "model").rename(here / "moved")
    said = refusal(2, "train", "--cache", "cache", "--method", "dpo")
    assert f"{here / 'model'}" in said
    assert "--model DIR" in said


def test_a_method_whose_rows_or_pairs_the_cache_does_not_hold(course, unpaired_cache, here):
    unpaired = (here / "run", "--cache", unpaired_cache)
    said = refused_by_all(course, 2, *unpaired, "--method", "dpo")
    assert "The method is paired" in said
    assert "unpaired (a completion and its label)" in said
    said = refused_by_all(course, 2, *unpaired, "--method", "kto")
    assert "mismatched completions" in said
    assert "--kl-pairs 1" in said


def test_a_damaged_shard_stops_all_ranks(course, here):
    shutil.copytree(course.cache, here / "cache")
    shard = sorted((here / "cache" / "data").iterdir())[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for ranks in (1, 2):
        said = refused_by_all(course, 5, here / "run", "--cache", here / "cache", ranks=ranks)
        assert f"{shard} is not what was written" in said


def test_a_folder_of_something_else_is_not_trained_in(course, here):
    (here / "photos").mkdir()
    (here / "photos" / "me.jpg").touch()
    assert "photos holds 'me.jpg'" in refused_by_all(course, 2, here / "photos")
    assert "is not a training run folder" in refused_by_all(course, 2, course.cache)


def test_an_adapter_of_layers_that_do_not_exist(course, here):
    targets = ("--lora", "--set", "lora.targets=[q_prj]")
    assert "lora.targets: ['q_prj']" in refused_by_all(course, 2, here / "run", *targets)
