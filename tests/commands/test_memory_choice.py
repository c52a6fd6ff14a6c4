"""What `auto` chooses for a budget of memory: beside all combinations, and in trainings."""

import gc
import json
import math
import shlex
import shutil
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from align.pipeline.options.settings import load_settings
from align.pipeline.options.settings_table import as_flags
from align.pipeline.plan import memory
from align.pipeline.plan.memory import (
    LADDER,
    OPEN,
    USABLE,
    Budget,
    changed,
    chosen,
    decided,
    planned,
)
from align.pipeline.plan.run_plan import plan_run, plan_text
from align.pipeline.plan.setting_checks import learning_rate_note
from align.pipeline.plan.workload import GivenRows
from align.pipeline.train.load import with_auto_decided
from align.pipeline.train.memory_at_start import chosen_to_fit, facts_of_run
from align.pipeline.train.resume import resumed_preset
from align.schemas.checkpoint import RunIdentity
from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.distributed import joined_world
from align.stages.feed.cache_index import ShardColumns, unchecked
from align.stages.feed.train_source import open_source
from align.stages.model import micro_batch
from align.stages.model.fused_head import BUFFER_BYTES
from support.command import align, refusal, success
from support.live_bytes import LiveBytes
from support.measured_peaks import TINY, WITHIN
from support.refusals import refuses
from support.stage_one import Heard
from support.training_world import ALONE, job_of, learn

GPUS = 2
ON_CPU = ModelOptions(device="cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A plan for two GPUs without a limit."""
    folder = tmp_path_factory.mktemp("policy")
    LlamaConfig(dtype="bfloat16", **TINY).save_pretrained(folder)
    sets = {"train.method": "dpo", "train.model": str(folder), "train.batch_size": 256}
    settings = load_settings({}, sets, file=None, command="plan")
    return plan_run(settings, ranks=GPUS, is_for_gpu=True, given=GivenRows(1000, 50, 50))


def within(facts, usable):
    """Facts with a budget of which so many bytes can be used."""
    return replace(facts, budget=Budget(math.ceil((usable + 1) / USABLE)))


def test_the_choice_is_the_first_rung_and_the_largest_micro_batch_that_fits(tiny):
    """Beside a walk over all of them."""
    config, facts = tiny.settings.config, tiny.facts
    every = [
        (changes, planned(config, facts, changes).estimate.peak)
        for rung in LADDER
        for changes in (rung, *({**rung, "train.tokens_per_batch": 1 << n} for n in (13, 12, 11)))
    ]
    peaks = sorted({peak for _, peak in every}, reverse=True)
    seen = set()
    for usable in peaks:
        choice = chosen(config, within(facts, usable))
        first = next(changes for changes, peak in every if peak <= usable)
        assert choice.fits
        assert choice.nearest.changes == first
        seen.add(as_flags(first, "train"))
    assert len(seen) > 6
    too_small = chosen(config, within(facts, peaks[-1] - 10_000))
    assert not too_small.fits
    assert too_small.nearest.estimate.peak == peaks[-1]
    # What fits nowhere anyway is not made slower: only what a training without a plan decides.
    assert too_small.changes == decided(config.train)
    assert as_flags(too_small.nearest.changes, "train") in "".join(too_small.lines())


def test_what_was_set_stays_and_what_changes_numbers_is_only_named(tiny):
    config, facts = tiny.settings.config, tiny.facts
    nothing = within(facts, 0)
    least = chosen(config, nothing).nearest.estimate.peak
    fixed = {"train.gradient_checkpointing": False, "train.deepspeed": "zero1"}
    choice = chosen(changed(config, fixed), within(facts, least))
    assert {*choice.nearest.changes} == {"train.tokens_per_batch"}
    assert not choice.fits
    assert choice.changes.items() >= {"train.gradient_checkpointing": False}.items()
    assert choice.advice.changes.keys() & fixed.keys()  # which would fit, and is the user's
    smallest = chosen(config, nothing)
    assert {*smallest.nearest.changes} <= OPEN.keys()
    assert smallest.nearest.estimate.optimizer > 0  # and nothing moves it to the CPU by itself
    advice = smallest.advice.changes
    assert advice.keys() - OPEN.keys() or "offload" in advice["train.deepspeed"]
    resumed = chosen(config, replace(nothing, resumed="zero1"))
    assert resumed.advice is None or "train.deepspeed" not in resumed.advice.changes


def test_dropout_is_drawn_for_the_micro_batches_that_were_asked_for(tiny):
    config = changed(tiny.settings.config, {"train.dropout": True})
    choice = chosen(config, within(tiny.facts, 0))
    assert choice.nearest.changes
    assert "train.tokens_per_batch" not in choice.nearest.changes


def test_inputs_of_layers_go_only_where_the_memory_of_the_cpu_holds_them(tiny):
    config, nothing = tiny.settings.config, within(tiny.facts, 0)
    smallest = chosen(config, nothing).nearest
    assert smallest.changes["train.checkpoint_offload"]
    without = chosen(config, replace(nothing, host=smallest.estimate.host - 1)).nearest
    assert "train.checkpoint_offload" not in without.changes
    assert chosen(config, replace(nothing, host=smallest.estimate.host)).nearest == smallest


def test_no_more_is_planned_with_than_a_gpu_has():
    asked = TrainOptions(memory="4g")
    assert Budget.of(asked, 0) == Budget.of(asked, 2**33) == Budget(2**32, is_asked=True)
    assert Budget.of(asked, 2**30) == Budget(2**30, is_asked=True)


def test_a_run_that_goes_on_keeps_its_stage_and_its_optimizer_where_it_is(tiny):
    name = "deepspeed zero_optimization.offload_optimizer.device"
    identity = RunIdentity("root", GPUS, 2, settings={}, computed={name: "'cpu'"})
    assert resumed_preset(identity) == "zero2-offload"
    assert resumed_preset(replace(identity, computed={}, zero_stage=3)) == "zero3"
    checkpoint = SimpleNamespace(identity=replace(identity, computed={}, zero_stage=1))
    run = SimpleNamespace(
        config=tiny.settings.config, world=ALONE, checkpoint=checkpoint, begins_as=ON_CPU
    )
    assert with_auto_decided(run, Heard()).train.deepspeed == "zero1"


@pytest.mark.parametrize(
    ("lr", "lora", "is_noted"), [(1e-5, True, True), (1e-5, False, False), (1e-4, True, False)]
)
def test_lora_at_a_rate_for_all_weights_is_noted(lr, lora, is_noted):
    note = learning_rate_note(TrainOptions(lr=lr), LoraOptions(enabled=lora))
    assert ("1e-4" in note) == is_noted


def test_the_command_at_the_end_of_a_plan_fits(tmp_path):
    shape = TINY | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 64_000}
    LlamaConfig(dtype="bfloat16", **shape).save_pretrained(tmp_path)
    rows = ("--rows", 1000, "--prompt-tokens", 300, "--completion-tokens", 1500, "--gpu", "2g")
    words = ("--method", "dpo", "--model", tmp_path, "--lr", "1e-5", "--lora")
    words = (*words, "--set", "train.gradient_checkpointing=false", "--tokens-per-batch", 32_768)
    first = align("plan", *words, *rows)
    assert first.out.startswith("Does not fit"), first
    *_, command = first.out.splitlines()
    program, name, cache, _, *flags = shlex.split(command)
    assert (program, name, cache) == ("align", "train", "--cache")
    assert {"--method", "--lora", "--lr"} <= {*flags}
    again = align("plan", *flags, *rows)
    assert again.out.startswith("Fits"), (first, again)
    lines = [one for one in first.out.splitlines() if str(tmp_path) not in one]
    assert max(map(len, lines)) <= 100
    assert any(" 300 " in one and " 1,500 " in one for one in lines)


@pytest.mark.parametrize(
    ("method", "file", "field", "is_refused"),
    [
        ("dpo", "config.json", "model.config", True),
        ("orpo", "config.json", "model.config", False),  # it has no reference
        ("orpo", "tokenizer.json", "tokenizer.vocabulary", True),
    ],
)
def test_a_plan_names_why_training_would_refuse_the_cache(
    training_world, tmp_path, method, file, field, is_refused
):
    other = shutil.copytree(training_world.model, tmp_path / "other")
    content = json.loads((other / file).read_text())
    if file == "config.json":
        content["rms_norm_eps"] = 0.5
    else:
        content["model"]["merges"].pop()
    (other / file).write_text(json.dumps(content))
    given = {"train.cache": str(training_world.pairs), "train.method": method}
    for model, is_noted in ((training_world.model, False), (other, is_refused)):
        with_model = given | {"train.model": str(model)}
        plan = plan_run(load_settings(with_model, {}, file=None, command="plan"))
        found = [one for one in plan_text(plan).splitlines() if str(other) in one and field in one]
        assert len(found) == is_noted


@pytest.mark.parametrize(("method", "is_advised"), [("dpo", True), ("kto", False)])
def test_a_plan_advises_against_kl_completions_unless_the_method_needs_them(
    training_world, method, is_advised
):
    given = {"train.cache": str(training_world.pairs), "train.method": method}
    plan = plan_run(load_settings(given, {}, file=None, command="plan"))
    assert ("--kl-pairs 0" in plan_text(plan)) == is_advised


def facts_on(job):
    """The facts of a training on this machine."""
    run = copy(job)
    run.source = open_source(job.cache, job.manifest, job.read_spec, ShardColumns(unchecked))
    return facts_of_run(run, device="cpu", device_bytes=0)


def asked(world, usable=0, **settings):
    """A training of which so many bytes can be used; 0: without a limit."""
    size = str(math.ceil((usable + 1) / USABLE)) if usable else ""
    settings = {"batch_size": 16, "max_steps": 2, "deepspeed": "auto", **settings}
    return job_of(world.pairs, "dpo", memory=size, **settings)


@pytest.fixture(scope="module")
def free(training_world):
    """A job without a limit, its facts, and what is chosen: nothing."""
    job = asked(training_world)
    facts = facts_on(job)
    return job.config, facts, chosen(job.config, facts)


@pytest.fixture(scope="module")
def least(free):
    """The fewest bytes with which the tiny policy can be trained."""
    config, facts, _ = free
    return chosen(config, within(facts, 0)).nearest.estimate.peak


def test_trainings_hold_what_was_planned_and_lose_the_same(training_world, free, least):
    """As it is, in smaller micro-batches, and with activations recomputed as well."""
    most = free[-1].given.estimate.peak
    budgets, losses, taken = (2 * most, (most + least) // 2, least), [], []
    for usable in budgets:
        job = asked(training_world, usable)
        gc.collect()
        with LiveBytes() as live, joined_world() as world:
            session, recorded = learn(job, world)
        choice = chosen(job.config, facts_on(job))
        assert session.config == changed(job.config, choice.changes)
        # The head's buffer, of one size for every model, is most of what so small a one holds.
        needs = choice.found.estimate
        plan, held = (size - BUFFER_BYTES for size in (needs.peak - needs.process, live.most))
        assert 0 < held <= (1 + WITHIN) * plan
        losses.append([line["loss"] for _, line in recorded.steps])
        taken.append(len(choice.found.changes))
    assert taken[0] == 0 < taken[1] < taken[2]
    assert len(losses[0]) == 2
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-6)


@pytest.fixture
def new_facts(training_world, tmp_path):
    """Facts of a training of a policy that has not been measured yet."""
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    facts = facts_on(asked(training_world))
    return replace(facts, policy=replace(facts.policy, path=str(tmp_path)))


def test_a_model_that_cannot_recompute_is_trained(training_world, new_facts, monkeypatch):
    """As some architectures of transformers have no gradient checkpointing."""
    monkeypatch.setattr(LlamaPreTrainedModel, "supports_gradient_checkpointing", False)
    config = asked(training_world).config
    choice = chosen(config, within(new_facts, 0))
    assert {*choice.nearest.changes} == {"train.tokens_per_batch"}
    assert "lora.enabled" in choice.advice.changes
    merging = chosen(changed(config, {"lora.start": "merge"}), within(new_facts, 0))
    assert "lora.enabled" not in (merging.advice or merging.nearest).changes
    with refuses(UsageError, "train.gradient_checkpointing"):
        chosen(changed(config, {"train.gradient_checkpointing": True}), new_facts)


def by_content(self, states):
    """Layers that look at their numbers, which a model without weights does not have."""
    return self.down_proj(self.up_proj(states)) if states.sum() > 0 else states


def one_by_one(self, states):
    """Layers that go over positions, as those of a recurrent model do without its kernels."""
    return torch.cat([self.down_proj(self.up_proj(one)) for one in states.split(1, dim=1)], dim=1)


def without_kernel(self, states):
    """Layers that are computed by a kernel, which wants tensors with numbers."""
    assert not states.is_meta
    return states


@pytest.mark.parametrize("forward", [by_content, one_by_one, without_kernel])
def test_a_model_that_cannot_be_planned_is_trained(
    new_facts, training_world, forward, monkeypatch, caplog
):
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setattr(micro_batch, "MOST_TENSORS", 1000)
    config, has, heard = asked(training_world).config, Budget(2**30), Heard()
    assert chosen_to_fit(config, replace(new_facts, budget=has), ALONE, heard) == changed(
        config, decided(config.train)
    )
    assert len(heard.lines) == 1  # that it is being planned
    assert [one.levelname for one in caplog.records if one.name == "align"] == ["WARNING"]
    wants = replace(new_facts, budget=replace(has, is_asked=True))
    monkeypatch.setattr(memory, "kept", None)  # it is known
    with refuses(UsageError, "train.memory"):
        chosen_to_fit(config, wants, ALONE, heard)


def test_a_run_says_what_it_chose_and_goes_on_in_other_memory(training_world, least, tmp_path):
    run, size = tmp_path / "run", math.ceil((least + 1) / USABLE)
    words = ("--cache", training_world.pairs, "--method", "dpo", "--batch-size", 32)
    out = (*words, "--output", run, "--no-mlflow", "--max-steps", 1)
    refusal(2, "train", *out, "--memory", size - 100_000, names=("MiB", "train.memory"))
    assert not run.exists() or not (run / "model").exists()

    first = success("train", *out, "--memory", size)
    assert "train.gradient_checkpointing=true" in first.err
    recorded = yaml.safe_load((run / "config.yaml").read_text())["train"]
    given = {"train.cache": str(training_world.pairs), "train.method": "dpo"}
    sets = {"train.memory": str(size), "train.batch_size": 32, "train.max_steps": 1}
    plan = plan_run(load_settings(given, sets, file=None, command="plan"))
    found = {name: value for name, value in plan.choice.changes.items() if name in OPEN}
    assert {f"train.{name}": value for name, value in recorded.items()}.items() >= found.items()
    assert found["train.gradient_checkpointing"] is True

    success("train", *out, "--max-steps", 2, "--resume", "auto")
    kept = yaml.safe_load((run / "config.yaml").read_text())["train"]
    assert (kept["gradient_checkpointing"], kept["tokens_per_batch"]) == (False, 0)
