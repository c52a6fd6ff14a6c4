"""What `align plan` tries where a training does not fit, beside figures worked by hand."""

import shlex
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from align.pipeline.options.settings import load_settings
from align.pipeline.plan.memory_choice import USABLE, amount
from align.pipeline.plan.memory_plan import Way
from align.pipeline.plan.memory_search import MemoryLimits, Tried, search
from align.pipeline.plan.plan_text import plan_text
from align.pipeline.plan.planned_rows import GivenRows
from align.pipeline.plan.remedies import (
    Attempt,
    Remedy,
    Situation,
    attempts,
    changed,
    flags_of,
    memory_savers,
)
from align.pipeline.plan.run_plan import PlanRequest, plan_run
from align.pipeline.plan.setting_checks import learning_rate_note
from align.pipeline.plan.workload import (
    RowShape,
    even_rows,
    feed_settings,
    planned_tokens,
    workload_of,
)
from align.schemas.batches import World
from align.schemas.config import Config
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.methods.table import recipe_of
from support.command import align
from support.planned_shapes import TINY

GIB = 2**30
# Eight layers of twice the width, a quarter of them and half the vocabulary: each row of the sum
# below is that of Llama 3.1 8B, and tracing takes a quarter of the time.
WIDE = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 8}
EIGHT_BILLION = WIDE | {"num_attention_heads": 64, "num_key_value_heads": 16, "vocab_size": 64_128}
ONE_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "vocab_size": 64_128,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def made(shape):
        folder = tmp_path_factory.mktemp("policy")
        LlamaConfig(dtype="bfloat16", **shape).save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def eight_billion(folder_of):
    return folder_of(EIGHT_BILLION)


@pytest.fixture(scope="module")
def one_billion(folder_of):
    return folder_of(ONE_BILLION)


def planned(folder, size, *, gpus=1, tokens=(300, 300), sets=()):
    """The plan for a GPU of so many GiB."""
    given = {"train.method": "dpo", "train.model": str(folder)}
    settings = load_settings(given, sets, file=None, command="plan")
    request = PlanRequest(
        gpu_bytes=round(size * GIB),
        gpus=gpus,
        is_for_gpu=True,
        rows=GivenRows(1000, *tokens),
    )
    return plan_run(settings, request)


def test_eight_billion_parameters_on_eight_gpus_by_hand(eight_billion):
    """Embedding and head, then of each layer: q and o, k and v, the MLP, two norms; the last."""
    width, mlp = 8192, 28_672
    layer = 2 * width**2 + 2 * width * width // 4 + 3 * width * mlp + 2 * width
    every = 2 * 64_128 * width + 8 * layer + width
    plan = planned(eight_billion, 80, gpus=8)
    assert plan.elements.total == every == 8_030_134_272
    share = every // 8
    for stage, weights in (("zero2", 2 * every), ("zero3", 2 * share)):
        held = plan.planner.constant(Way("full", stage, checkpointing=False))
        # 12 bytes of a share: master weight and two moments; its gradient in float32.
        assert (held.weights, held.optimizer, held.later) == (weights, 12 * share, 4 * share)
    # LoRA of rank 16 has (inputs + outputs) x 16 of each matrix.
    adapter = 8 * 16 * (2 * 2 * width + 2 * (width + width // 4) + 3 * (width + mlp))
    held = plan.planner.constant(Way("lora", "zero2", checkpointing=False))
    assert (held.weights, held.optimizer) == (2 * (every + adapter), 12 * adapter // 8)
    # Stage 1 keeps gradients of all weights in float32 on every rank, stage 2 those of a share.
    given = plan.choice.given.components
    assert (given.weights, given.gradients) == (2 * every, 4 * every)
    assert plan.choice.found.changes == {"train.deepspeed": "zero2"}
    assert plan.fits(plan.own)


def test_lora_of_a_billion_fits_4_gib_by_smaller_batches_and_recomputing(one_billion):
    """2 GiB of weights; the activations of a row of 3,300 tokens are kept nowhere else."""
    plan = planned(one_billion, 4, tokens=(300, 1500), sets=["lora.enabled=true"])
    assert plan.own.weights > 1.9 * GIB
    changes = plan.choice.found.changes
    assert changes.keys() == {"train.tokens_per_batch", "train.gradient_checkpointing"}
    assert plan.fits(plan.own)


def test_the_flags_of_the_verdict_can_be_copied(folder_of):
    one_layer = folder_of(ONE_BILLION | {"num_hidden_layers": 1})
    words = ("plan", "--method", "dpo", "--model", one_layer, "--gpu", "3g", "--lora")
    words = (*words, "--rows", 1000, "--prompt-tokens", 300, "--completion-tokens", 1500)
    words = (*words, "--set", "train.gradient_checkpointing=false", "--tokens-per-batch", 16_384)
    first = align(*words)
    verdict, remedy, *_ = first.out.splitlines()
    assert verdict.startswith("Does not fit")
    assert remedy.startswith("Fits with")
    assert "1e-4 to 2e-4" in first.out  # the rate of the settings is the one for all weights
    again = align(*words, *shlex.split(first.out.split("\n\n")[1]))
    assert again.out.startswith("Fits: "), (first, again)
    by_itself = align(*words[:-4])  # what was set is left open
    assert by_itself.out.split("\n\n")[1] == first.out.split("\n\n")[1]
    for answer in (first, again, by_itself):
        lines = [one for one in answer.out.splitlines() if str(one_layer) not in one]
        assert max(map(len, lines)) <= 80


def test_a_billion_parameters_that_all_learn_need_more_than_24_gib(one_billion):
    """2 + 12 + 6 bytes of each: 24.7 of 24 GB, so that only their optimizer can go elsewhere."""
    plan = planned(one_billion, 24)
    every = plan.elements.total
    assert 20 * every > USABLE * 24 * GIB > 8 * every
    held = plan.planner.constant(Way("full", "zero1", checkpointing=False))
    assert held.weights + held.optimizer + held.later == 20 * every
    found = plan.choice.found
    assert found.changes["train.deepspeed"] == "zero2-offload"
    assert plan.fits(found.components)
    assert found.components.host == 16 * every  # master weights, moments, gradients
    assert "--lora" in plan_text(plan)  # would do without the CPU, and is named only


@pytest.fixture(scope="module")
def tiny(folder_of):
    return planned(folder_of(TINY), 1000, tokens=(50, 50))


def test_the_first_attempt_that_fits_is_the_one_that_is_found(tiny):
    """Beside a search that leaves no attempt out."""

    known = {}

    def work_of(train):
        feed = feed_settings(
            train,
            recipe_of("dpo", {}),
            World(0, 1, 0),
            tokens=train.tokens_per_batch or 16_384,
            pads=False,
        )
        even = even_rows(1000, RowShape(50, (50, 50)), num_partners=0)
        return workload_of(even, feed, train, rows=1000, held_out=0)

    def planner_of(config):
        if repr(config.train) not in known:
            known[repr(config.train)] = work_of(config.train)
        work = known[repr(config.train)]
        return tiny.planner.changed(config.train, config.lora, work.trees(), work.micro_batches)

    now = Situation(Config(), 1, 1, tiny.workload.micro_tokens)
    every = []
    for attempt in attempts(now):
        for changes in attempt.choices:
            planner = planner_of(changed(now.config, changes))
            if planner.is_possible(planner.own_way):
                every.append((changes, planner.components(planner.own_way).peak))
    peaks = sorted({peak for _, peak in every if peak < tiny.own.peak})
    own = Tried(Attempt((), ({},)), {}, tiny.own_way, tiny.own)
    for usable in (peaks[0] - 1, *peaks[::5]):
        found = search(now, planner_of, MemoryLimits(usable), own)
        fitting = [changes for changes, peak in every if peak <= usable]
        if fitting:
            assert found.changes == fitting[0]
        else:
            assert found.components.peak == peaks[0]


def test_what_fits_nowhere_is_told_the_nearest_and_by_how_much(tiny):
    plan = planned(tiny.policy, 0.001, tokens=(50, 50))
    nearest = plan.remedy.components.peak
    assert not plan.fits(plan.remedy.components)
    # ZeRO 0 sums gradients in 16 bits, and is never advised.
    others = [one.peak for way, one in plan.memory if way.deepspeed != "zero0"]
    assert nearest <= min(others)
    more = nearest - plan.choice.budget.usable
    said = " ".join(plan_text(plan).split())
    assert said.startswith("Does not fit")
    assert amount(more) in said
    flags = flags_of(plan.remedy.changes)
    assert flags in plan_text(plan)


def test_a_new_remedy_is_one_entry_and_a_later_one_waits_for_all_sets_before_it():
    now = Situation(Config(), 1, 1, 4096)
    a = Remedy("a", lambda _: [{"train.epochs": 2}])
    b = Remedy("b", lambda _: [{"train.lr": 1.0}, {"train.lr": 2.0}])
    c = Remedy("c", lambda _: [{"train.epochs": 3, "train.seed": 1}])
    in_use = Remedy("d", lambda _: [{"train.epochs": 1}])
    found = [str(one) for one in attempts(now, (a, b, c, in_use))]
    assert found == ["a", "b", "a, b", "c", "b, c"]  # a and c set the same
    both = next(one for one in attempts(now, (a, b)) if len(one.remedies) == 2)
    assert both == Attempt(
        (a, b), ({"train.epochs": 2, "train.lr": 1.0}, {"train.epochs": 2, "train.lr": 2.0})
    )
    assert flags_of(both.choices[0], {"train.epochs"}) == "--set train.epochs=2 --lr 1.0"


def settings_tried(now):
    return [changes for one in attempts(now) for changes in one.choices]


def test_remedies_are_those_that_are_of_use():
    alone = Situation(Config(), 1, 1, 16_384)
    tried = settings_tried(alone)
    assert not any(one.get("train.deepspeed") == "zero3" for one in tried)
    several = replace(alone, ranks=4)
    assert {"train.deepspeed": "zero3"} in settings_tried(several)
    packed = changed(Config(), {"lora.enabled": True, "lora.quantize": "nf4"})
    for one in settings_tried(replace(several, config=packed)):
        assert "zero3" not in one.get("train.deepspeed", "")
    # A run whose micro-batches were halved is told all else, first what it can go on with.
    advice = [*memory_savers(several)]
    assert "--deepspeed zero2" in advice
    assert not any("tokens-per-batch" in one for one in advice)
    kept = [not one.startswith("in a new run") for one in advice]
    assert kept == sorted(kept, reverse=True)
    assert any(one.endswith("--lora") for one in advice)


def test_another_accelerator_is_given_the_micro_batches_of_a_gpu():
    on_gpu = Situation(Config(), 1, 4, 16_384)
    other = replace(on_gpu, device="xpu")
    assert (
        settings_tried(other)
        == settings_tried(on_gpu)
        != settings_tried(replace(other, device="cpu"))
    )
    asked = TrainOptions()
    assert (
        planned_tokens(asked, "xpu") == planned_tokens(asked, "cuda") > planned_tokens(asked, "cpu")
    )


def test_lora_at_a_rate_for_all_weights_is_noted():
    lora, slow = LoraOptions(enabled=True), TrainOptions(lr=1e-5)
    assert "1e-4 to 2e-4" in learning_rate_note(slow, lora)
    assert not learning_rate_note(slow, LoraOptions())
    for train in (TrainOptions(lr=1e-4), TrainOptions(lr=0.0)):
        assert not learning_rate_note(train, lora)
