"""The plan of a training beside figures worked by hand, and beside what trainings hold."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from align.pipeline.options.settings import load_settings
from align.pipeline.plan.memory import Budget
from align.pipeline.plan.run_plan import plan_run, plan_text
from align.pipeline.plan.workload import GivenRows, RowShape, even_rows, feed_settings, workload_of
from align.schemas.batches import World
from align.schemas.rows import Tree
from align.schemas.train_options import TrainOptions
from align.stages.engine.deepspeed_config import EngineContext, engine_config
from align.stages.engine.engine_memory import Elements, engine_memory
from align.stages.methods.table import objective_of
from align.stages.model.cheap_again import cheap_computed_again
from align.stages.model.fused_head import call_head_for_logps
from align.stages.model.logprobs import ScoringPath, branch_logps
from align.stages.model.micro_batch import kept
from align.stages.model.transformers_compat import recompute_activations
from align.stages.model.tree_attention import tree_batch
from support.families import DELTA
from support.live_bytes import LiveBytes
from support.measured_peaks import CASES, MODELS, TINY, WITHIN, plan_of

GIB, MIB = 2**30, 2**20
PACKED = ScoringPath("packed", "fused")


def held(elements, preset, ranks=1, device="cuda", dtype="bfloat16"):
    train = TrainOptions(deepspeed=preset, dtype=dtype)
    config = engine_config(train, EngineContext(dtype, 8, ranks, device))
    itemsize = 2 if dtype == "bfloat16" else 4
    return engine_memory(elements, config, train, ranks=ranks, itemsize=itemsize, device=device)


def test_a_thousand_parameters_in_bfloat16_on_four_ranks():
    for preset, weights, optimizer, gradients in (
        ("zero0", 2000, 12_000, 2000),  # 2 bytes; 4 + 8 of all; gradients as the weights
        ("zero1", 2000, 3000, 6000),  # 12 of a quarter; gradients in 16 bits and float32, of all
        ("zero2", 2000, 3000, 1000),  # 4 of a quarter
        ("zero3", 500, 3000, 1000),  # 2 of a quarter
    ):
        found = held(Elements(1000, 0, 100), preset, ranks=4)
        assert (found.weights, found.optimizer, found.gradients) == (weights, optimizer, gradients)
    offloaded = held(Elements(1000, 0, 100), "zero3-offload", ranks=4)
    assert (offloaded.weights, offloaded.optimizer) == (0, 0)
    assert offloaded.host == 500 + 3000 + 1000  # weights, master and moments, gradients
    adapter = held(Elements(10, 1000, 5), "zero1")
    assert (adapter.weights, adapter.optimizer, adapter.gradients) == (2020, 120, 60)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a config of transformers, made once."""
    made = {}

    def folder_of(config):
        if (key := config.to_json_string()) not in made:
            made[key] = tmp_path_factory.mktemp("policy")
            config.save_pretrained(made[key])
        return made[key]

    return folder_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_is_within_15_percent_of_what_was_measured_and_never_far_below(saved, case):
    found = plan_of(case, saved(LlamaConfig(**MODELS[case.model], dtype=case.dtype)))
    tensors = (found.peak - found.process) / MIB
    assert 0.95 * case.peak <= tensors <= (1 + WITHIN) * case.peak


def drawn(kind="llama", dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 2000,
    }
    settings = {"llama": {}, "qwen3_5_text": {**DELTA, "num_hidden_layers": 2}}[kind]
    config = AutoConfig.for_model(kind, **{**sizes, **settings})
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def some_trees():
    random = np.random.default_rng(0)
    sizes = [(24, 12, 20), (9, 16, 16), (30, 4, 7)] * 4
    draw = [[random.integers(0, 2000, size).astype(np.int32) for size in each] for each in sizes]
    return [Tree(parts[0], tuple(parts[1:])) for parts in draw]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_activations_are_those_that_a_model_with_weights_keeps(kind, dtype):
    with torch.device("meta"):
        empty = drawn(kind, dtype)
    plain, dropping, recomputing = kept(empty, some_trees(), PACKED)
    batch = tree_batch(some_trees(), torch.device("cpu"), packed=True)
    # With recomputed activations the layers share rotations, which no hook is handed.
    for expected, within in ((plain, 0.05), (dropping, 0.05), (recomputing, 0.1)):
        real = drawn(kind, dtype).train()
        if expected is recomputing:
            recompute_activations(real)
        call_head_for_logps(real)
        head, found = real.get_output_embeddings(), []
        branch_logps(real, batch, PACKED).sum().backward()  # attention and the buffer are set
        gc.collect()
        hooks = cheap_computed_again() if expected is dropping else nullcontext()
        with LiveBytes([*real.parameters(), *real.buffers(), head.buffer._buffer]) as live:
            head.register_forward_pre_hook(lambda *_, live=live, to=found: to.append(live.now))
            with hooks:
                branch_logps(real, batch, PACKED)
        assert expected.whole == pytest.approx(found[-1], rel=within)


def worked(method, train, world, rows, levels):
    """So many rows of 10 + 20 + 20 tokens, 500 tokens at a time."""
    feed = feed_settings(train, objective_of(method, {}), world, tokens=500, pads=False)
    even = even_rows(rows, RowShape(10, (20, 20)), num_partners=levels)
    return workload_of(even, feed, train, rows=rows, held_out=0)


def test_steps_and_tokens_of_even_rows():
    """100 rows, 30 a step: 4 steps an epoch, the last of 10 rows."""
    work = worked("kto", TrainOptions(batch_size=30, epochs=2), World(0, 2, 0), 100, levels=1)
    assert (work.steps, work.learned_tokens) == (8, 2 * 100 * 50)
    assert work.mismatched_tokens == 2 * 100 * 50  # each prompt once more, and both partners
    # 15 rows of each rank: two micro-batches of ten and of five, filled evenly.
    assert (work.micro_batches, work.micro_tokens) == (2, 400)
    assert work.predicted == pytest.approx(0.8)


def test_steps_and_tokens_of_a_part_of_an_epoch():
    """A quarter of 4 steps more than an epoch, of 30 rows; and half of them, which are 60 rows."""
    more = worked("dpo", TrainOptions(batch_size=30, epochs=1.25), World(0, 2, 0), 100, levels=0)
    assert (more.steps, more.learned_tokens) == (5, 130 * 50)
    half = worked("dpo", TrainOptions(batch_size=30, epochs=0.5), World(0, 2, 0), 100, levels=0)
    assert (half.steps, half.learned_tokens) == (2, 60 * 50)
    cut = TrainOptions(batch_size=30, epochs=2, max_steps=1)
    assert worked("dpo", cut, World(0, 2, 0), 100, levels=0).epochs == 0.25


# Eight layers of twice the width, a quarter of them and half the vocabulary: each row of the sum
# below is that of Llama 3.1 8B.
EIGHT_BILLION = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "vocab_size": 64_128,
    "dtype": "bfloat16",
}
ONE_BILLION = EIGHT_BILLION | {
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}


def on_gpus(folder, size, *, ranks=1, tokens=(300, 300), sets=()):
    """The plan for GPUs of so many GiB."""
    given = {"train.method": "dpo", "train.model": str(folder)}
    settings = load_settings(given, sets, file=None, command="plan")
    rows = GivenRows(1000, *tokens)
    return plan_run(settings, gpu_bytes=round(size * GIB), ranks=ranks, is_for_gpu=True, given=rows)


def test_eight_billion_parameters_on_eight_gpus_by_hand(saved):
    """Embedding and head, then of each layer: q and o, k and v, the MLP, two norms; the last."""
    width, mlp = 8192, 28_672
    layer = 2 * width**2 + 2 * width * width // 4 + 3 * width * mlp + 2 * width
    every = 2 * 64_128 * width + 8 * layer + width
    assert every == 8_030_134_272
    folder = saved(LlamaConfig(**EIGHT_BILLION))
    plan = on_gpus(folder, 80, ranks=8)
    # Stage 1 keeps gradients of all weights in float32 on every rank, stage 2 those of a share.
    given, share = plan.choice.given.estimate, every // 8
    assert given.weights == 2 * every
    assert 4 * every <= given.gradients <= 6 * every
    assert plan.choice.fits
    assert plan.own.changes == {"train.deepspeed": "zero2"}
    assert (plan.own.estimate.weights, plan.own.estimate.optimizer) == (2 * every, 12 * share)
    # LoRA of rank 16 has (inputs + outputs) x 16 of each matrix.
    adapter = 8 * 16 * (2 * 2 * width + 2 * (width + width // 4) + 3 * (width + mlp))
    of_lora = on_gpus(folder, 80, ranks=8, sets=["lora.enabled=true"]).choice.given.estimate
    assert (of_lora.weights, of_lora.optimizer) == (2 * (every + adapter), 12 * adapter // 8)


def test_lora_of_a_billion_fits_4_gib_by_smaller_batches_and_recomputing(saved):
    """2 GiB of weights; the activations of a row of 3,300 tokens are kept nowhere else."""
    plan = on_gpus(
        saved(LlamaConfig(**ONE_BILLION)), 4, tokens=(300, 1500), sets=["lora.enabled=true"]
    )
    assert plan.own.estimate.weights > 1.9 * GIB
    assert plan.own.changes.keys() == {"train.tokens_per_batch", "train.gradient_checkpointing"}
    assert plan.choice.fits


def test_a_billion_parameters_that_all_learn_need_more_than_24_gib(saved):
    """2 + 12 + 6 bytes of each: `auto` leaves the optimizer where it is, and names the flag."""
    plan = on_gpus(saved(LlamaConfig(**ONE_BILLION)), 20)
    assert not plan.choice.fits
    assert plan.own.estimate.host == 0
    advice = plan.choice.advice
    assert advice.changes["train.deepspeed"] == "zero2-offload"
    assert Budget(20 * GIB).holds(advice.estimate)
    assert advice.estimate.host > 0
    lines = plan_text(plan).splitlines()
    assert "--deepspeed zero2-offload" in lines[-1]


def test_a_config_alone_is_planned(saved):
    settings = load_settings(
        {"train.method": "dpo", "train.model": str(saved(LlamaConfig(**TINY)))},
        {"train.dtype": "bfloat16"},
        file=None,
        command="plan",
    )
    plan = plan_run(settings, is_for_gpu=True, given=GivenRows(1000, 50, 50))
    assert plan.own.workload.learned_tokens == 1000 * 150
    assert (plan.rows.own_tokens, plan.rows.mismatched_tokens) == (1000 * 150, 1000 * 100)
    peak = plan.own.estimate.peak
    assert not Budget(peak).holds(plan.own.estimate)  # a GPU has gaps
    assert Budget(peak * 10 // 9).holds(plan.own.estimate)
