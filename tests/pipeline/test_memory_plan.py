"""The plan of a training beside figures worked by hand, and beside what trainings hold."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from align.pipeline.options.settings import load_settings
from align.pipeline.plan.memory_choice import Budget
from align.pipeline.plan.memory_plan import Components, MemoryPlanner, Planned, Way, at_peak
from align.pipeline.plan.planned_rows import GivenRows
from align.pipeline.plan.run_plan import PlanRequest, plan_run
from align.pipeline.plan.workload import RowShape, even_rows, feed_settings, workload_of
from align.schemas.batches import World
from align.schemas.config import ModelOptions
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.engine_memory import Elements, Setting, engine_memory
from align.stages.methods.table import recipe_of
from align.stages.model.head.fused_head_backward import call_head_for_logps
from align.stages.model.layouts.tree_attention import tree_batch
from align.stages.model.loading.adapters import add_lora
from align.stages.model.loading.load import empty_model
from align.stages.model.logprobs import ScoringPath, branch_logps
from align.stages.model.memory.live_memory import LiveMemory
from align.stages.model.memory.memory_trace import Moment, Trace, trace
from align.stages.model.transformers_compat import recompute_activations
from support.planned_shapes import TINY, WITHIN

PACKED = ScoringPath("packed", "fused")
PLAIN, ADAPTER = LoraOptions(), LoraOptions(enabled=True)
HALF = Setting(stage=1, ranks=4, itemsize=2, device="cuda", bucket=10)


def test_a_thousand_parameters_in_bfloat16_on_four_ranks():
    for stage, weights, optimizer, gradients in (
        (0, 2000, 12_000, 2000),  # 2 bytes; 4 + 8 of every parameter; gradients as the weights
        (1, 2000, 3000, 6000),  # 12 of a quarter; gradients in 16 bits and float32, of all
        (2, 2000, 3000, 1000),  # 4 of a quarter
        (3, 500, 3000, 1000),  # 2 of a quarter
    ):
        held = engine_memory(Elements(1000, 0, 100), replace(HALF, stage=stage))
        assert (held.weights, held.optimizer, held.later) == (weights, optimizer, gradients), stage
    offloaded = replace(HALF, stage=3, offloads_optimizer=True, offloads_weights=True)
    held = engine_memory(Elements(1000, 0, 100), offloaded)
    assert (held.weights, held.optimizer) == (0, 0)
    assert held.host == 500 + 3000 + 1000  # weights, master and moments, gradients of a quarter
    adapter = engine_memory(Elements(10, 1000, 5), replace(HALF, ranks=1))
    assert (adapter.weights, adapter.optimizer, adapter.later) == (2020, 120, 60)


def test_the_peak_is_the_largest_moment_of_a_step():
    """Two micro-batches: the second meets all gradients of the first, 6,000 bytes."""
    held = engine_memory(Elements(1000, 0, 100), replace(HALF, ranks=1, device="cpu"))
    traced = Trace((Moment(0, 700, 0), Moment(0, 500, 300), Moment(1000, 10, 0)), 500, 0, 64)
    later = at_peak(held, traced, 2)
    assert replace(later, host=1000).peak == later.peak  # of the GPU
    assert later == Components(2000, 14_000, 12_000, 0, 64, 0, 0, 0)  # the update: 8 bytes more
    fused = engine_memory(Elements(1000, 0, 100), replace(HALF, ranks=1))
    assert at_peak(fused, traced, 2).gradients == 6000
    assert (at_peak(fused, traced, 2).activations, at_peak(fused, traced, 2).head) == (500, 364)
    once = at_peak(fused, traced, 1)  # 4,000 stay, and 2,000 come until the end of the pass
    assert (once.gradients, once.activations) == (6000, 10)
    # ZeRO-2 keeps more from the first gradient of a step on.
    more = replace(fused, at_first_gradient=fused.at_first_gradient + 50)
    assert at_peak(more, traced, 1).gradients == once.gradients + 50


def drawn(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        vocab_size=2000,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def some_trees():
    random = np.random.default_rng(0)
    sizes = [(40, 30, 50), (64, 64, 64), (17, 90, 3)]
    draw = [[random.integers(0, 2000, size).astype(np.int32) for size in each] for each in sizes]
    return [Tree(parts[0], tuple(parts[1:])) for parts in draw]


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [(torch.float32, False), (torch.bfloat16, True)]
)
def test_activations_are_those_that_a_model_with_weights_keeps(dtype, checkpointing):
    real = drawn(dtype=dtype)
    with torch.device("meta"):
        empty = drawn(dtype=dtype)
    for model in (real, empty):
        model.train()
        if checkpointing:
            recompute_activations(model)
    call_head_for_logps(real)
    batch, live = tree_batch(some_trees(), torch.device("cpu"), packed=True), LiveMemory("cpu")
    head = real.get_output_embeddings()
    kept = []
    head.register_forward_pre_hook(lambda *_: kept.append(live.now))
    branch_logps(real, batch, PACKED)  # attention and the head's buffer are set
    gc.collect()
    with live:
        for tensor in (*real.parameters(), *real.buffers(), head.buffer._buffer):
            live.know(tensor)
        loss = branch_logps(real, batch, PACKED).sum()
        live.restart()
        loss.backward()
    traced = trace(empty, some_trees(), PACKED, device="cpu")
    assert traced.kept == pytest.approx(kept[-1], rel=0.05)
    whole = max(one.layers + one.head + one.finished * dtype.itemsize for one in traced.moments)
    assert whole == pytest.approx(live.most, rel=WITHIN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a config of transformers."""

    def made(config):
        folder = tmp_path_factory.mktemp("policy")
        config.save_pretrained(folder)
        return folder

    return made


def traced_as_planned(folder, lora=PLAIN, **train):
    """What the plan traces of a training."""
    settings = {"train": TrainOptions(**train), "lora": lora, "dtype": "float32", "device": "cpu"}
    of_step = {"head": "none", "layout": "packed", "trees": some_trees(), "micro_batches": 1}
    planner = MemoryPlanner(
        Planned(ModelOptions(path=str(folder), device="cpu"), ranks=1, **settings, **of_step)
    )
    return planner, planner.parts(planner.own_way)[1]


def test_an_adapter_is_traced_as_the_training_computes_it(saved):
    folder = saved(LlamaConfig(**TINY))
    by_peft = add_lora(empty_model(ModelOptions(path=str(folder)), "float32"), ADAPTER, seed=0)
    planner, plain = traced_as_planned(folder, ADAPTER)
    assert plain == trace(by_peft, some_trees(), PACKED, device="cpu")
    noisy = replace(ADAPTER, dropout=0.1)
    assert traced_as_planned(folder, noisy)[1] == plain
    assert traced_as_planned(folder, noisy, dropout=True)[1].kept > plain.kept
    # The runs of a sweep share what was traced, and nothing else does.
    again, _ = traced_as_planned(folder, ADAPTER, deepspeed="zero3", lr=1e-3)
    assert again._policy is planner._policy
    LlamaConfig(**TINY | {"num_hidden_layers": 2}).save_pretrained(folder)
    assert traced_as_planned(folder, ADAPTER)[1].kept > plain.kept


def test_dropout_that_is_off_keeps_nothing(saved):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 2000}
    still, noisy = (
        saved(GPT2Config(**sizes, resid_pdrop=share, embd_pdrop=share)) for share in (0.0, 0.1)
    )
    expected = traced_as_planned(still)[1]
    assert traced_as_planned(noisy)[1] == expected
    assert traced_as_planned(noisy, dropout=True)[1].kept > expected.kept


def worked(method, train, world, rows, levels):
    """So many rows of 10 + 20 + 20 tokens, 500 tokens at a time."""
    feed = feed_settings(train, recipe_of(method, {}), world, tokens=500, pads=False)
    even = even_rows(rows, RowShape(10, (20, 20)), num_partners=levels)
    return workload_of(even, feed, train, rows=rows, held_out=0)


def test_steps_and_tokens_of_even_rows():
    """100 rows, 30 a step: 4 steps an epoch, the last of 10 rows."""
    work = worked("kto", TrainOptions(batch_size=30, epochs=2), World(0, 2, 0), 100, levels=1)
    assert (work.steps, work.learned_tokens) == (8, 2 * 100 * 50)
    assert work.mismatched_tokens == 2 * 100 * 50  # each prompt once more, and both partners
    # 15 rows of each rank: two micro-batches of ten and of five, filled evenly.
    assert (work.micro_batches, work.micro_tokens) == (2, 400)
    assert sum(tree.num_tokens for tree in work.trees()) == 400


def test_steps_and_tokens_of_a_part_of_an_epoch():
    """A quarter of 4 steps more than an epoch, of 30 rows; and half of them, which are 60 rows."""
    more = worked("dpo", TrainOptions(batch_size=30, epochs=1.25), World(0, 2, 0), 100, levels=0)
    assert (more.steps, more.learned_tokens) == (5, 130 * 50)
    half = worked("dpo", TrainOptions(batch_size=30, epochs=0.5), World(0, 2, 0), 100, levels=0)
    assert (half.steps, half.learned_tokens) == (2, 60 * 50)


@pytest.fixture(scope="module")
def bare_policy(tmp_path_factory):
    """A folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("policy")
    drawn().config.save_pretrained(folder)
    return folder


def planned(bare_policy, *, is_for_gpu=False, **settings):
    sets = {"train.method": "dpo", "train.model": str(bare_policy)}
    sets |= {name.replace("_", ".", 1): value for name, value in settings.items()}
    request = PlanRequest(rows=GivenRows(1000, 50, 50), is_for_gpu=is_for_gpu)
    return plan_run(load_settings({}, sets, file=None, command="plan"), request)


def test_a_config_alone_is_planned(bare_policy):
    plan = planned(bare_policy, is_for_gpu=True, train_dtype="bfloat16")
    sizes = dict(plan.memory)
    assert plan.own_way == Way("full", "zero1", checkpointing=False)
    assert plan.workload.learned_tokens == 1000 * 150
    assert (plan.rows.own_tokens, plan.rows.mismatched_tokens) == (1000 * 150, 1000 * 100)
    for way, least in sizes.items():
        if not way.checkpointing:
            assert sizes[replace(way, checkpointing=True)].peak <= least.peak
    assert not Budget(plan.own.peak).holds(plan.own)  # a GPU has gaps
    assert Budget(plan.own.peak * 10 // 9).holds(plan.own)
