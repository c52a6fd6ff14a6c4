"""The memory that `align plan` says of stage 1, by hand and beside what scoring really takes."""

import gc
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from align.pipeline.options.settings import load_settings
from align.pipeline.plan.plan_text import plan_text
from align.pipeline.plan.planned_rows import GivenRows
from align.pipeline.plan.run_plan import PlanRequest, plan_run
from align.pipeline.plan.scoring_plan import Scoring, ScoringSettings
from align.schemas.config import ModelOptions
from align.schemas.row_keys import key_rows
from align.stages.feed.cache_index import RowSizes
from align.stages.model.memory.live_memory import LiveMemory
from align.stages.model.reference import HfReference
from align.stages.score.score import KnownScores, ScoringRules, score_unit
from support.encoded_rows import encoded

WIDTH, MLP, VOCABULARY = 96, 640, 3000
SHAPE = {"hidden_size": WIDTH, "intermediate_size": MLP, "vocab_size": VOCABULARY}
SHAPE |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
ROWS, PROMPT, COMPLETION = 30, 40, 25


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of the model with its weights in some type."""
    made = {}

    def call(dtype):
        if dtype not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=dtype)
            made[dtype] = tmp_path_factory.mktemp("reference")
            model.save_pretrained(made[dtype])
        return str(made[dtype])

    return call


def even_sizes(count, prompt, completion):
    """So many rows of one prompt and two completions."""
    lengths = np.full((2 * count, 1), completion, np.int32)
    prompts, offsets = np.full(count, prompt), 2 * np.arange(count + 1)
    is_chosen = np.arange(2 * count) % 2 == 0
    return RowSizes.of(np.arange(count), prompts, lengths, lengths[:, 0], is_chosen, offsets)


def scoring_of(folder, *, budget, dtype="float32", device="cpu"):
    settings = ScoringSettings(ModelOptions(path=folder), dtype, device, 0, budget, 4096)
    return Scoring(0, 0, even_sizes(ROWS, PROMPT, COMPLETION), settings)


def test_weights_and_the_mlp_of_a_pass_are_those_worked_by_hand(folder_of):
    """The budget of 450 tokens takes five rows of 90 tokens; a pass may have 1,024."""
    kept = WIDTH * WIDTH // 2  # of two key heads beside four
    layer = 2 * WIDTH**2 + 2 * kept + 3 * WIDTH * MLP + 2 * WIDTH
    every = 2 * VOCABULARY * WIDTH + 3 * layer + WIDTH
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        found = scoring_of(folder_of(torch.float32), budget=450, dtype=dtype).memory
        assert (found.batch_tokens, found.pass_tokens) == (450, 450)
        assert size * every <= found.weights <= size * every + 1024  # two of 12 frequencies
        # Gate, up and their product are alive together, beside the residual and its norm.
        least = size * 450 * (3 * MLP + 2 * WIDTH)
        assert least <= found.activations <= 1.2 * least
    # Twice a tile of 512 of the 3,000 logits of each completion token, in float32.
    tiles = 2 * 4 * 5 * 2 * COMPLETION * 512
    assert tiles <= scoring_of(folder_of(torch.float32), budget=450).memory.head <= 1.3 * tiles


@pytest.mark.parametrize(
    ("dtype", "budget"), [("float32", 450), ("float32", 5000), ("bfloat16", 5000)]
)
def test_scoring_takes_what_is_planned(folder_of, dtype, budget):
    """With 5,000 tokens, a CPU's passes are of eleven rows: 990 of at most 1,024 tokens."""
    folder = folder_of(getattr(torch, dtype))
    drawn = np.random.default_rng(0).integers(3, VOCABULARY, (ROWS, PROMPT + 2 * COMPLETION))
    records = [
        encoded(each[:PROMPT], *(each[PROMPT:][:COMPLETION], each[-COMPLETION:]), row=row)
        for row, each in enumerate(drawn.tolist())
    ]
    block = key_rows(records, carried=()).rows
    nothing = KnownScores(np.zeros(2 * ROWS, np.bool_), None, np.zeros(2 * ROWS), {})
    scorer, live = HfReference(ModelOptions(path=folder, device="cpu")).open(), LiveMemory("cpu")
    weights = [*scorer.model.parameters(), *scorer.model.buffers()]
    for tensor in weights:
        live.know(tensor)
    gc.collect()
    with live:
        score_unit(
            block,
            nothing,
            ScoringRules(budget, WIDTH, keep_token_logps=False),
            scorer=lambda: scorer,
            on_batch=lambda batch: None,
        )
    found = scoring_of(folder, budget=budget, dtype=dtype).memory
    assert found.weights == sum(one.nbytes for one in weights)
    assert max(found.activations, found.head) == pytest.approx(live.most, rel=0.03)
    assert found.pass_tokens == (450 if budget == 450 else 990)


def test_batches_are_halved_until_they_fit_as_stage_1_does(folder_of):
    scoring = scoring_of(folder_of(torch.float32), budget=2000, device="cuda")
    peaks = [scoring.memory_with(budget).peak for budget in (2000, 1000, 500, 250)]
    assert peaks == sorted(peaks, reverse=True)
    assert scoring.fitting(peaks[0]) == scoring.memory
    for budget, peak in zip((1000, 500, 250), peaks[1:], strict=True):
        assert scoring.fitting(peak) == scoring.memory_with(budget)
    alone = scoring.fitting(scoring.memory.weights)  # which leaves nothing for a batch
    assert alone.batch_tokens == PROMPT + COMPLETION
    assert alone.peak > scoring.memory.weights


def planned(folder, **settings):
    sets = {"train.method": "dpo", "train.model": folder} | settings
    request = PlanRequest(gpu_bytes=2**40, is_for_gpu=True, rows=GivenRows(1000, 50, 50))
    return plan_run(load_settings({}, sets, file=None, command="plan"), request)


def test_the_page_says_whether_stage_1_fits_and_the_flags_with_which_it_does(folder_of):
    folder = folder_of(torch.float32)
    plan = planned(folder, **{"scoring.tokens_per_batch": 2000})
    assert "Stage 1 does not fit" not in plan_text(plan)
    request = replace(plan.request, gpu_bytes=round(plan.scoring.memory_with(500).peak / 0.92))
    blocks = plan_text(replace(plan, request=request)).split("\n\n")
    said = next(index for index, block in enumerate(blocks) if "Stage 1 does not fit" in block)
    assert shlex.split(blocks[said + 1]) == ["--tokens-per-batch", "500"]
    lines = [line for block in blocks for line in block.splitlines() if folder not in line]
    assert max(map(len, lines)) <= 80
    away = replace(plan.scoring.settings.reference, adapter="/nowhere/adapter")
    scoring = replace(plan.scoring, settings=replace(plan.scoring.settings, reference=away))
    assert "not here" in plan_text(replace(plan, request=request, scoring=scoring))
