"""Both stages where the reference has an adapter: it is trained further, or merged."""

import json
import math
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

from support.families import saved_adapter
from support.refusals import require_names
from support.trainings import KILLED, Course, learned, refused

pytestmark = pytest.mark.filterwarnings(  # peft's own, while it saves an adapter
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
SHAPE = {
    "target_modules": ["q_proj", "down_proj"],
    "rank_pattern": {"down_proj": 2},
    "lora_dropout": 0.1,
}
FILE = "adapter_model.safetensors"
RESUME = ("--resume", "auto")


@pytest.fixture(scope="module")
def adapted(course, world, tmp_path_factory):
    """Runs over a cache whose reference is a base with an adapter."""
    made = Course(course.server, tmp_path_factory.mktemp("adapted"))
    shutil.copytree(course.model, made.model)
    adapter = saved_adapter(made.folder / "adapter", made.model, **SHAPE)
    reference = ("--model", made.model, "--adapter", adapter)
    words = (*reference, "--output", made.cache, "--shards", 8, "--no-mlflow")
    course.server.success("precompute-ref", world.data.paired, *words)
    return made


@pytest.mark.parametrize(("method", "loss"), [("dpo", math.log(2)), ("kto", 0.5)])
def test_it_begins_as_the_reference_and_resumes_to_the_bit(adapted, tmp_path, method, loss):
    words, run = ("--method", method), tmp_path / "run"
    whole = adapted.whole(*words)
    assert learned(whole)[0]["eval/loss"] == pytest.approx(loss, abs=1e-6)
    adapted.ends(KILLED, run, *words, fault="before:update=kill@6")
    said = adapted.run(run, *words, *RESUME).out
    assert learned(run) == learned(whole)
    assert (run / "model" / FILE).read_bytes() == (whole / "model" / FILE).read_bytes()
    following = (
        f"next: align sample prompts.jsonl --model {adapted.model} --adapter {run / 'model'}"
    )
    assert following in said.splitlines()


@pytest.mark.parametrize("preset", [pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_two_ranks_resume_it_to_the_bit(adapted, tmp_path, preset):
    words, run = ("--method", "dpo", "--deepspeed", preset), tmp_path / "run"
    whole = adapted.whole(*words, ranks=2)
    assert learned(whole)[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    kills = ["before:update=kill@6"] * 2
    answers = adapted.start(run, *words, ranks=2, faults=kills).answers()
    assert answers[0].code == KILLED, answers
    adapted.run(run, *words, *RESUME, ranks=2)
    assert learned(run) == learned(whole)
    assert (run / "model" / FILE).read_bytes() == (whole / "model" / FILE).read_bytes()


def test_one_adapter_of_the_same_shape_is_saved_for_the_base(adapted, tmp_path):
    whole = adapted.whole("--method", "dpo")
    before, after = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (adapted.folder / "adapter", whole / "model")
    )
    for settings in (before, after):
        settings["target_modules"].sort()  # peft stores a set
    assert after == before | {"base_model_name_or_path": str(adapted.model)}
    old, new = (load_file(one / FILE) for one in (adapted.folder / "adapter", whole / "model"))
    assert {name: one.shape for name, one in new.items()} == {
        name: one.shape for name, one in old.items()
    }
    assert not any(torch.equal(new[name], old[name]) for name in old)
    loaded = AutoPeftModelForCausalLM.from_pretrained(whole / "model").state_dict()
    assert all(torch.equal(loaded[f"{n[:-7]}.default.weight"], one) for n, one in new.items())
    settings = (whole / "config.yaml").read_text()
    require_names(settings, "start: adapter", "rank: 4", "enabled: true")
    assert " with adapter |" in (whole / "model" / "README.md").read_text()

    # It is merged later, and answers beside the model before it.
    run = shutil.copytree(whole, tmp_path / "run")
    adapted.run(run, "--method", "dpo", "--merge", *RESUME)
    merged, base = (
        load_file(folder / "model.safetensors") for folder in (run / "model-merged", adapted.model)
    )
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}
    adapted.server.success("report", run, "--answers", 1, "--answer-tokens", 4)
    assert (run / "answers.jsonl").exists()


def test_on_a_bfloat16_base_it_learns_in_float32(adapted, tmp_path):
    run = tmp_path / "run"
    answer = adapted.run(run, "--method", "dpo", "--dtype", "bfloat16", "--max-steps", 1)
    assert str(adapted.folder / "adapter") in answer.err
    stored = load_file(run / "model" / FILE).values()
    assert {one.dtype for one in stored} == {torch.float32}
    # DeepSpeed casts nothing, and the adapter has bits that bfloat16 cannot hold.
    assert not any(torch.equal(one, one.bfloat16().float()) for one in stored)
    engine = json.loads((run / "deepspeed.json").read_text())
    assert not engine["bf16"]["enabled"]


def test_in_four_bits_it_is_saved_for_the_plain_base(adapted, tmp_path):
    run = tmp_path / "run"
    adapted.run(run, "--method", "dpo", "--quantize", "nf4", "--merge", "--max-steps", 1)
    plain = AutoPeftModelForCausalLM.from_pretrained(run / "model").merge_and_unload().state_dict()
    merged = load_file(run / "model-merged" / "model.safetensors")
    assert all(torch.equal(plain[name], one) for name, one in merged.items())


def test_a_new_adapter_is_trained_on_merged_weights(adapted, tmp_path):
    merged, run = tmp_path / "merged", tmp_path / "run"
    shutil.copytree(adapted.model, merged)
    old = AutoPeftModelForCausalLM.from_pretrained(adapted.folder / "adapter")
    old.merge_and_unload().save_pretrained(merged)
    words = ("--model", merged, "--set", "train.other_reference=true", "--max-steps", 1)
    adapted.run(run, "--lora", "--lora-rank", 3, *words)
    settings = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"]) == (str(merged), 3)


def test_both_stages_in_one_command_train_it_further(adapted, world, tmp_path):
    words = ("run", world.data.paired, "--model", adapted.model, "--method", "orpo", "--no-mlflow")
    adapter = ("--adapter", adapted.folder / "adapter")
    output = ("--output", tmp_path / "run", "--cache", tmp_path / "cache", "--max-steps", 1)
    answer = adapted.server.run(*words, *adapter, *output, "--lora-rank", 3)
    assert answer.code == 2  # before stage 1
    require_names(answer.err, "lora.rank", "3", "4")
    assert not (tmp_path / "cache").exists()
    adapted.server.success(*words, *adapter, *output)
    assert (tmp_path / "run" / "model" / FILE).exists()


def test_merging_it_first_trains_all_weights(adapted, tmp_path):
    words = ("--method", "dpo", "--lora-start", "merge", "--max-steps", 1)
    adapted.run(tmp_path / "run", *words)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert "start: merge" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_plan_counts_the_weights_of_the_adapter(adapted):
    size = sum(one.numel() for one in load_file(adapted.folder / "adapter" / FILE).values())
    words = ("plan", "--cache", adapted.cache, "--method", "dpo")
    plan = adapted.server.success(*words).out
    require_names(plan, adapted.folder / "adapter", f" {size:,} learn")
    reference = {"path": adapted.model, "adapter": adapted.folder / "adapter"}
    before = [f"--set=model.{name}={value}" for name, value in reference.items()]
    plan = adapted.server.success("plan", "--rows", 9, "--method", "dpo", *before).out
    require_names(plan, adapted.folder / "adapter", f" {size:,} learn")
    assert "all learn" in adapted.server.success(*words, "--lora-start", "merge").out


def test_settings_that_contradict_the_adapter_are_refused(adapted, course, tmp_path):
    for code, words, names in (
        (2, ("--lora-rank", 3), ("lora.rank", "3", "4")),
        (2, ("--lora-target", "k_proj"), ("lora.targets", "k_proj", "q_proj")),
        (2, ("--lora-alpha", 5), ("lora.alpha", "5")),
        (2, ("--lora", "--lora-start", "merge"), ("--lora-start merge",)),
        (2, ("--no-lora", "--lora-start", "adapter"), ("--lora-start merge",)),
        (2, ("--no-lora", "--merge"), ("lora.merge", "--lora")),
        (2, ("--lora", "--method", "reward"), ("reward",)),
    ):
        refused(adapted, code, tmp_path, *words, names=names)
    refused(course, 2, tmp_path, "--lora-start", "merge", names=("lora.start",))


def test_another_adapter_is_refused(adapted, tmp_path):
    """Orpo asks for no reference, so only the run's own record holds the adapter to it."""
    cache = ("--cache", adapted.cache, "--method", "orpo")
    run, adapter = tmp_path / "run", adapted.folder / "adapter"
    kept = shutil.copytree(adapter, tmp_path / "kept")
    adapted.ends(KILLED, run, *cache, fault="before:update=kill@6")
    changed = {name: 2 * one for name, one in load_file(adapter / FILE).items()}
    save_file(changed, adapter / FILE, metadata={"format": "pt"})
    try:
        refused(adapted, 4, run, *cache, *RESUME, names=("model.adapter",))
        refused(adapted, 4, tmp_path / "kept", "--method", "dpo", names=("model.adapter",))
    finally:
        shutil.copy(kept / FILE, adapter / FILE)
    adapted.run(run, *cache, *RESUME)
