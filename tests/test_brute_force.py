"""Every stored log-prob against one row, one branch, one forward pass of the model itself.

    ref_logp = sum_t log softmax(model(prompt + completion).logits[t - 1])[completion[t]]

The logits are float32, the softmax and the sum float64. Nothing is sampled.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from align.pipeline.precompute import precompute
from align.schemas.config import (
    CacheOptions,
    Config,
    DataOptions,
    ModelOptions,
    ScoringOptions,
    TokenOptions,
    TrackingOptions,
)
from align.schemas.rows import LEAST, allowed_gaps
from align.stages.demo.tiny_world import make_world
from align.stages.model.reference import HfReference
from support.stage_one import Silent

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

SUM = 1e-10  # nats: n u in float64 of 300 tokens and 2,000 nats

FAMILIES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048},
    "mistral": {"sliding_window": 16, "head_dim": 16},
    "gemma2": {
        "sliding_window": 16,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Gap:
    """How far a cache is from the brute force."""

    branches: int
    branch: float  # worst branch, as a share of what the program allows it
    token: float  # worst token, nats
    branch_mean_token: float  # worst branch, mean absolute nats a token
    stored_sum: float  # worst distance of ref_logp from the sum of its own ref_token_logps


def config_of(model, data, folder, **model_options):
    return Config(
        model=ModelOptions(path=str(model), **model_options),
        data=DataOptions(files=[str(data)]),
        tokens=TokenOptions(max_length=2048),
        cache=CacheOptions(output=str(folder), token_logps=True, reuse_known=False),
        tracking=TrackingOptions(mlflow=False),
    )


def stored(config):
    """Scores with the real reference, and reads every row back."""
    outcome = precompute(config, HfReference(config.model), progress=Silent())
    folder = Path(config.cache.output)
    files = [folder / "data" / commit.file for commit in outcome.manifest.shards]
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(rows) == outcome.manifest.rows
    assert outcome.manifest.quarantined == {}
    return rows, outcome


@torch.inference_mode()
def brute_force(model, prompt, completion):
    """The log-prob of each token of one completion: (tokens,) float64."""
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logps = torch.log_softmax(logits.double(), dim=-1)
    return torch.stack(
        [logps[len(prompt) + place - 1, token] for place, token in enumerate(completion)]
    )


def gap_of(rows, model_folder, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    branch_gap = token_gap = mean_gap = sum_gap = 0.0
    branches = 0
    for row in rows:
        every = zip(
            row["completion_ids"],
            row["ref_logp"],
            row["ref_token_logps"],
            row["num_tokens"],
            strict=True,
        )
        for completion, logp, token_logps, num_tokens in every:
            expected = brute_force(model, row["prompt_ids"], completion)
            assert num_tokens == len(completion) == len(token_logps) > 0
            tokens = torch.tensor(token_logps, dtype=torch.float64)
            gaps = (tokens - expected).abs()
            (allowed,) = allowed_gaps(np.array([num_tokens]), "float32")
            branch_gap = max(branch_gap, abs(logp - float(expected.sum())) / allowed)
            token_gap = max(token_gap, float(gaps.max()))
            mean_gap = max(mean_gap, float(gaps.mean()))
            sum_gap = max(sum_gap, abs(logp - float(tokens.sum())))
            branches += 1
    return Gap(branches, branch_gap, token_gap, mean_gap, sum_gap)


@pytest.fixture(scope="module", params=[200, pytest.param(2000, marks=pytest.mark.long)])
def large_world(request, tmp_path_factory):
    """Preferences, and a Llama that has seen a little of their language."""
    folder = tmp_path_factory.mktemp("large-world") / "world"
    return make_world(folder, rows=request.param, pretrain_steps=20)


@pytest.fixture(scope="module")
def whole(large_world, tmp_path_factory):
    """The cache of all rows, with one mismatched completion for each of theirs."""
    return stored(
        config_of(
            large_world.model, large_world.data.paired, tmp_path_factory.mktemp("whole") / "c"
        )
    )


def test_every_branch_is_what_the_model_says(large_world, whole, record_property):
    rows, outcome = whole
    count = pq.read_metadata(large_world.data.paired).num_rows
    gap = gap_of(rows, large_world.model)
    record_property("gap", str(gap))
    assert (len(rows), gap.branches) == (count, 4 * count)
    assert sum(role == 5 for row in rows for role in row["role"]) == 2 * count
    assert gap.branch <= 1
    assert gap.token <= LEAST
    assert gap.stored_sum <= SUM
    distinct = {(*row["prompt_ids"], None, *ids) for row in rows for ids in row["completion_ids"]}
    assert outcome.tally.scored == len(distinct)
    assert outcome.tally.reused == 4 * count - len(distinct)


def test_the_brute_force_tells_a_shifted_token_from_the_right_one(large_world, whole):
    """A check that cannot fail would prove nothing: one wrong prompt token is seen."""
    rows = [dict(row) for row in whole[0][:1]]
    rows[0]["prompt_ids"] = rows[0]["prompt_ids"][:-1]
    assert gap_of(rows, large_world.model).branch > 100


@pytest.fixture(scope="module")
def fifty(large_world, tmp_path_factory):
    """The first fifty rows."""
    path = tmp_path_factory.mktemp("fifty") / "fifty.parquet"
    pq.write_table(pq.read_table(large_world.data.paired).slice(0, 50), path)
    return path


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_batch_size_moves_no_token_by_more_than_rounding(
    large_world, fifty, tmp_path, attention
):
    """1 puts every branch into a batch of its own; sdpa packs trees, eager pads them."""
    results = []
    for budget in (1, 300, 16_384):
        config = config_of(large_world.model, fifty, tmp_path / f"{budget}", attention=attention)
        rows, outcome = stored(replace(config, scoring=ScoringOptions(tokens_per_batch=budget)))
        assert outcome.tally.scored == 200
        assert (outcome.tally.padding > 0) == (attention == "eager" and budget > 1)
        results.append(rows)
    for rows in results[:2]:
        assert worst_token(rows, results[2]) <= LEAST


def worst_token(rows, others):
    worst = 0.0
    for mine, theirs in zip(rows, others, strict=True):
        assert mine["row_id"] == theirs["row_id"]
        for some, same in zip(mine["ref_token_logps"], theirs["ref_token_logps"], strict=True):
            worst = max(worst, *(abs(a - b) for a, b in zip(some, same, strict=True)))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_what_their_models_say(large_world, fifty, family, tmp_path):
    model = make_family(family, large_world, tmp_path / "model")
    rows, _ = stored(config_of(model, fifty, tmp_path / "cache"))
    window = FAMILIES[family].get("sliding_window", 0)
    assert min(len(row["prompt_ids"]) for row in rows) > window // 2
    assert max(len(row["prompt_ids"]) for row in rows) > window
    gap = gap_of(rows, model)
    assert gap.branches == 200
    assert gap.branch <= 1
    assert gap.token <= LEAST


def test_bfloat16_is_as_near_as_bfloat16_can_be(large_world, fifty, tmp_path):
    """bfloat16 keeps 8 bits: near its typical logits of 4 to 8 one step is 1/32 nat.

    The fused head rounds states and weights but no logit, the model's own head rounds each logit
    too. So a token may be off by a few steps, and in the mean over a branch by about one.
    """
    rows, _ = stored(config_of(large_world.model, fifty, tmp_path / "cache", dtype="bfloat16"))
    own = gap_of(rows, large_world.model, torch.bfloat16)
    exact = gap_of(rows, large_world.model)
    assert own.branches == 200
    assert own.branch_mean_token <= 1 / 32
    assert own.token <= 4 / 32
    assert exact.branch_mean_token <= 1 / 32
    assert exact.stored_sum <= SUM


def make_family(name, world, folder):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name, **{**COMMON, **FAMILIES[name], "vocab_size": 1024, **TOKENS}
    )
    config._attn_implementation = "eager"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in world.tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
