"""What `auto` chooses for a budget of memory: beside all combinations, and in trainings."""

import gc
import math
from copy import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from align.pipeline.options.settings import flatten, load_settings
from align.pipeline.plan import memory_plan
from align.pipeline.plan.memory_choice import OPEN, USABLE, Budget, chosen, decided
from align.pipeline.plan.planned_rows import GivenRows
from align.pipeline.plan.remedies import REMEDIES, changed, flags_of, memory_savers
from align.pipeline.plan.run_plan import PlanRequest, plan_run
from align.pipeline.train.memory_at_start import begun_preset, chosen_to_fit, facts_of_run
from align.schemas.checkpoint import RunIdentity
from align.schemas.errors import UsageError
from align.schemas.train_options import TrainOptions
from align.stages.engine.distributed import joined_world
from align.stages.feed.cache_index import ShardColumns, unchecked
from align.stages.feed.train_source import open_source
from align.stages.model.head.fused_head_backward import BUFFER_BYTES
from align.stages.model.memory import memory_trace
from align.stages.model.memory.live_memory import LiveMemory
from support.command import align, refusal
from support.planned_shapes import TINY, WITHIN
from support.refusals import refuses
from support.stage_one import Heard
from support.training_world import ALONE, job_of, learn

GPUS = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A plan for two GPUs without a limit."""
    folder = tmp_path_factory.mktemp("policy")
    LlamaConfig(dtype="bfloat16", **TINY).save_pretrained(folder)
    sets = {"train.method": "dpo", "train.model": str(folder), "train.batch_size": 256}
    request = PlanRequest(gpus=GPUS, is_for_gpu=True, rows=GivenRows(1000, 50, 50))
    return plan_run(load_settings({}, sets, file=None, command="plan"), request)


def within(choice_or_facts, usable):
    """Facts with a budget of which so many bytes can be used."""
    return replace(choice_or_facts, budget=Budget(math.ceil((usable + 1) / USABLE)))


# Every value that the settings may take, with what it counts: a later one in the list of remedies
# counts more than all before it together.
TOKENS = {0: 0, 8192: 1, 4096: 1, 2048: 1}
STAGES = {"auto": 0, "zero2": 2, "zero3": 8, "zero2-offload": 32, "zero3-offload": 64}
RECOMPUTED = {("auto", "auto"): 0, (True, "auto"): 4, (True, True): 16}


def every_combination(planning, config):
    """Each with its place in the order, and its peak."""
    for tokens, stage, (recomputes, offloads) in product(TOKENS, STAGES, RECOMPUTED):
        values = (tokens, recomputes, offloads, stage)
        made = changed(config, dict(zip(OPEN, values, strict=True)))
        planner = planning.planner(made)
        peak = planner.components(planner.own_way).peak
        cost = TOKENS[tokens] + STAGES[stage] + RECOMPUTED[recomputes, offloads]
        yield (cost, -tokens), values, peak


def test_the_choice_is_the_first_of_all_combinations_that_fits(tiny):
    planning = tiny.choice.planning
    config, facts = planning.config, planning.facts
    every = sorted(every_combination(planning, config))
    peaks = sorted({peak for *_, peak in every}, reverse=True)
    seen = set()
    for usable in (*peaks[:: len(peaks) // 6], peaks[-1]):
        choice = chosen(config, within(facts, usable))
        values = next(values for _, values, peak in every if peak <= usable)
        taken = flatten(changed(config, choice.found.changes))
        assert tuple(taken[name] for name in OPEN) == values
        assert choice.fits
        assert choice.found.components.peak <= usable
        seen.add(values)
    assert len(seen) > 4
    too_small = chosen(config, within(facts, peaks[-1] - 10_000))
    assert not too_small.fits
    assert too_small.nearest.components.peak == peaks[-1]
    # What fits nowhere anyway is not made slower: only what a training without a plan decides.
    assert too_small.found == too_small.given
    assert too_small.config == chosen(config, facts).config
    assert flags_of(too_small.nearest.changes) in "".join(too_small.lines())


def test_what_was_set_stays_and_what_changes_numbers_is_only_named(tiny):
    config, facts = tiny.choice.planning.config, tiny.choice.planning.facts
    least = chosen(config, within(facts, 0)).nearest.components.peak
    fixed = {"train.gradient_checkpointing": False, "train.deepspeed": "zero1"}
    choice = chosen(changed(config, fixed), within(facts, least))
    assert {*choice.nearest.changes} == {"train.tokens_per_batch"}
    assert flatten(choice.config).items() >= fixed.items()
    assert not choice.fits
    assert choice.remedy.changes.keys() & fixed.keys()
    # Nothing but what is open is ever another than it was.
    before, after = flatten(config), flatten(chosen(config, within(facts, least)).config)
    assert {name for name in before if before[name] != after[name]} <= OPEN.keys()


def test_dropout_is_drawn_for_the_micro_batches_that_were_asked_for(tiny):
    config = changed(tiny.choice.planning.config, {"train.dropout": True})
    choice = chosen(config, within(tiny.choice.planning.facts, 0))
    assert choice.nearest.changes
    assert "train.tokens_per_batch" not in choice.nearest.changes


def test_no_more_is_planned_with_than_a_gpu_has(caplog):
    budget = Budget.of(TrainOptions(memory="4g"), 2**30)
    assert budget.within(0) == budget.within(2**32) == budget  # a CPU; a GPU of as much
    assert not caplog.records
    assert budget.within(2**30) == replace(budget, size=2**30)
    assert len(caplog.records) == 1


def test_nothing_goes_to_a_cpu_that_has_no_room_for_it(tiny):
    config, facts = tiny.choice.planning.config, tiny.choice.planning.facts
    least = chosen(config, within(facts, 0))
    assert least.nearest.components.host > 0
    choice = chosen(config, replace(within(facts, least.nearest.components.peak), host=0))
    assert choice.nearest.components.host == 0
    assert not choice.fits


def test_a_run_that_goes_on_keeps_its_optimizer_where_it_is(tiny):
    config, facts = tiny.choice.planning.config, tiny.choice.planning.facts
    smallest = within(facts, 0)
    for begun in ("zero1", "zero3"):
        choice = chosen(config, replace(smallest, begun=begun, is_resumed=True))
        assert not choice.nearest.way.offloads
    kept = chosen(config, replace(within(facts, 2**40), begun="zero2-offload", is_resumed=True))
    assert kept.config.train.deepspeed == "zero2-offload"
    now = kept.planning.situation(kept.config)
    stages = [one.get("train.deepspeed", "") for each in REMEDIES for one in each.open_to(now)]
    assert all("offload" in stage for stage in stages if stage)
    name = "deepspeed zero_optimization.offload_optimizer.device"
    identity = RunIdentity("root", GPUS, 2, settings={}, computed={name: "'cpu'"})
    assert begun_preset(identity) == "zero2-offload"
    assert begun_preset(replace(identity, computed={}, zero_stage=3)) == "zero3"


def facts_on(job):
    """The facts of a training on this machine."""
    run = copy(job)
    run.source = open_source(job.cache, job.manifest, job.read_spec, ShardColumns(unchecked))
    return facts_of_run(run)


def asked(world, memory=0, **settings):
    """A training of which so many bytes can be used; 0: without a limit."""
    size = str(math.ceil((memory + 1) / USABLE)) if memory else ""
    settings = {"batch_size": 16, "max_steps": 2, "deepspeed": "auto", **settings}
    return job_of(world.pairs, "dpo", memory=size, **settings)


@pytest.fixture(scope="module")
def free(training_world):
    """What is chosen without a limit: nothing."""
    job = asked(training_world)
    return chosen(job.config, facts_on(job))


@pytest.fixture(scope="module")
def least(free):
    """The fewest bytes with which the tiny policy can be trained."""
    return chosen(free.planning.config, within(free.planning.facts, 0)).nearest.components.peak


def test_trainings_hold_what_was_planned_and_lose_the_same(training_world, free, least):
    """As it is, in smaller micro-batches, and with activations recomputed as well."""
    most = free.given.components.peak
    budgets, losses, taken = (2 * most, (most + least) // 2, least), [], []
    for usable in budgets:
        job = asked(training_world, usable)
        gc.collect()
        with LiveMemory("cpu") as live, joined_world() as world:
            session, recorded = learn(job, world)
        choice = chosen(job.config, facts_on(job))
        assert session.config == choice.config
        # The head's buffer, of one size for every model, is most of what so small a one holds.
        planned, held = (size - BUFFER_BYTES for size in (choice.found.components.peak, live.most))
        assert 0 < held <= (1 + WITHIN) * planned
        losses.append([line["loss"] for _, line in recorded.steps])
        taken.append(len(choice.found.changes))
        assert live.most > min(budgets) or usable == min(budgets)
    assert taken == [0, 1, 2]
    assert len(losses[0]) == 2
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-6)


@pytest.fixture
def new_facts(training_world, tmp_path):
    """Facts of a training of a policy that has not been traced yet."""
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    facts = facts_on(asked(training_world))
    return replace(facts, policy=replace(facts.policy, path=str(tmp_path)))


@pytest.fixture
def never_recomputes(monkeypatch):
    """Llama as one of the architectures of transformers that have no gradient checkpointing."""
    monkeypatch.setattr(LlamaPreTrainedModel, "supports_gradient_checkpointing", False)


def test_a_model_that_cannot_recompute_is_trained_by_the_other_remedies(
    never_recomputes, training_world, new_facts
):
    job = asked(training_world)
    choice = chosen(job.config, within(facts_on(job), 0))
    tried = choice.nearest.changes.keys() | choice.remedy.changes
    assert {"train.tokens_per_batch", "lora.enabled"} <= tried
    assert "train.gradient_checkpointing" not in tried
    planner = choice.planning.planner(job.config)
    assert not any(planner.is_possible(way) for way in planner.ways() if way.checkpointing)
    with joined_world() as world:
        session, recorded = learn(
            asked(training_world, choice.nearest.components.peak, max_steps=1), world
        )
    assert session.config.train.gradient_checkpointing is False
    assert len(recorded.steps) == 1
    now = choice.planning.situation(session.config)
    assert not any("checkpoint" in one for one in memory_savers(now))
    with refuses(UsageError, "train.gradient_checkpointing"):
        chosen(changed(job.config, {"train.gradient_checkpointing": True}), new_facts)


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
def test_a_model_that_cannot_be_planned_is_trained_without_a_plan_unless_one_is_asked_for(
    new_facts, training_world, forward, monkeypatch, caplog
):
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setattr(memory_trace, "MOST_OPERATIONS", 2000)
    config, has, heard = asked(training_world).config, Budget(2**30), Heard()
    assert chosen_to_fit(config, replace(new_facts, budget=has), ALONE, heard) == changed(
        config, decided(config.train)
    )
    assert len(heard.lines) == 1  # that it is being planned
    assert [one.levelname for one in caplog.records if one.name == "align"] == ["WARNING"]
    wants = replace(new_facts, budget=replace(has, is_asked=True))
    monkeypatch.setattr(memory_plan, "trace", None)  # it is known
    with refuses(UsageError, "train.memory"):
        chosen_to_fit(config, wants, ALONE, heard)


def test_a_deep_model_is_traced_within_the_bound(new_facts, training_world, monkeypatch):
    """126 layers with an adapter, recomputed: by what one of them takes."""
    monkeypatch.setattr(memory_trace, "MOST_OPERATIONS", memory_trace.MOST_OPERATIONS // 126)
    most = {"train.gradient_checkpointing": True, "lora.enabled": True, "train.deepspeed": "zero3"}
    config = changed(asked(training_world).config, most)
    facts = replace(new_facts, device="cuda")
    assert chosen(config, facts).found.components.activations > 0


def test_a_run_says_what_it_chose_and_goes_on_in_other_memory(training_world, least, tmp_path):
    run, size = tmp_path / "run", math.ceil((least + 1) / USABLE)
    words = ("--cache", training_world.pairs, "--method", "dpo", "--batch-size", 32)
    out = (*words, "--output", run, "--no-mlflow", "--max-steps", 1)
    refusal(2, "train", *out, "--memory", size - 100_000, names=("MiB", "train.memory"))
    assert not run.exists() or not (run / "model").exists()

    first = align("train", *out, "--memory", size)
    assert first.code == 0, first
    assert "chosen to fit" in first.err
    recorded = yaml.safe_load((run / "config.yaml").read_text())["train"]
    given = {"train.cache": str(training_world.pairs), "train.method": "dpo"}
    sets = {"train.memory": str(size), "train.batch_size": 32, "train.max_steps": 1}
    plan = plan_run(load_settings(given, sets, file=None, command="plan"), PlanRequest())
    found = {name: value for name, value in plan.choice.changes.items() if name in OPEN}
    assert {f"train.{name}": value for name, value in recorded.items()}.items() >= found.items()
    assert found["train.gradient_checkpointing"] is True

    again = align("train", *out, "--max-steps", 2, "--resume", "auto")
    assert again.code == 0, again
    assert "chosen to fit" not in again.err
    kept = yaml.safe_load((run / "config.yaml").read_text())["train"]
    assert (kept["gradient_checkpointing"], kept["tokens_per_batch"]) == (False, 0)
