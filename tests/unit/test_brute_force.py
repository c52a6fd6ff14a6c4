"""Every stored log-prob against one row, one branch, one forward pass of the model itself.

    ref_logp = sum_t log softmax(model(prompt + completion).logits[t - 1])[completion[t]]

The logits are float32, the softmax and the sum float64. Nothing is sampled.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from align.pipeline.precompute.precompute import precompute
from align.schemas.config import CacheOptions, Config, ModelOptions, ScoringOptions, TrackingOptions
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.rows import LEAST, allowed_gaps
from align.stages.model.reference import HfReference
from support.stage_one import Silent
from support.worlds import make_world

pytestmark = pytest.mark.numeric

SUM = 1e-10  # nats: n u in float64 of 300 tokens and 2,000 nats
SOME = 8  # rows


def stored(model, data, folder, *, budget=16_384, **model_options):
    """Scores with the real reference, and reads every row back."""
    config = Config(
        model=ModelOptions(path=str(model), **model_options),
        data=DataOptions(files=[str(data)]),
        tokens=TokenOptions(max_length=2048),
        cache=CacheOptions(output=str(folder), token_logps=True, reuse_known=False),
        tracking=TrackingOptions(mlflow=False),
        scoring=ScoringOptions(tokens_per_batch=budget),
    )
    outcome = precompute(config, HfReference(config.model), progress=Silent())
    files = [Path(folder) / "data" / commit.file for commit in outcome.manifest.shards]
    rows = pq.read_table(files).to_pylist()
    assert len(rows) == outcome.manifest.rows == pq.read_metadata(data).num_rows
    assert outcome.manifest.reasons == {}
    return rows, outcome.counts


@torch.inference_mode()
def brute_force(model, prompt, completion):
    """The log-prob of each token of one completion: (tokens,) float64."""
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logps = torch.log_softmax(logits.double(), dim=-1)
    return torch.stack(
        [logps[len(prompt) + place - 1, token] for place, token in enumerate(completion)]
    )


class Gap(NamedTuple):
    """How far a branch is from the brute force, or the worst of them."""

    branch: float  # as a share of what the program allows it
    token: float  # nats
    mean_token: float  # mean absolute nats a token
    stored_sum: float  # of ref_logp from the sum of its own ref_token_logps


def gap_of(rows, model_folder, dtype=torch.float32):
    how = {"dtype": dtype, "attn_implementation": "eager"}
    model, gaps = AutoModelForCausalLM.from_pretrained(model_folder, **how).eval(), []
    columns = ("completion_ids", "ref_logp", "ref_token_logps", "num_tokens")
    for row in rows:
        for completion, logp, token_logps, num_tokens in zip(
            *(row[name] for name in columns), strict=True
        ):
            expected = brute_force(model, row["prompt_ids"], completion)
            assert num_tokens == len(completion) == len(token_logps) > 0
            tokens = torch.tensor(token_logps, dtype=torch.float64)
            off = (tokens - expected).abs()
            (allowed,) = allowed_gaps(np.array([num_tokens]), "float32")
            of_sums = abs(logp - expected.sum()) / allowed, abs(logp - tokens.sum())
            gaps.append((of_sums[0], off.max(), off.mean(), of_sums[1]))
    return Gap(*(float(max(column)) for column in zip(*gaps, strict=True)))


@pytest.fixture(scope="module", params=[30, pytest.param(2000, marks=pytest.mark.long)])
def large_world(request, tmp_path_factory):
    """Preferences, and a Llama that has seen a little of their language."""
    folder = tmp_path_factory.mktemp("large-world") / "world"
    return make_world(folder, rows=request.param, pretrain_steps=8)


@pytest.fixture
def some(large_world, tmp_path):
    """The first rows."""
    path = tmp_path / "some.parquet"
    pq.write_table(pq.read_table(large_world.data.paired).slice(0, SOME), path)
    return path


def test_every_branch_is_what_the_model_says(large_world, tmp_path):
    """With one mismatched completion for each of theirs."""
    rows, tally = stored(large_world.model, large_world.data.paired, tmp_path / "cache")
    gap = gap_of(rows, large_world.model)
    assert sum(role == 5 for row in rows for role in row["role"]) == 2 * len(rows)
    assert gap.branch <= 1
    assert gap.token <= LEAST
    assert gap.stored_sum <= SUM
    distinct = {(*row["prompt_ids"], None, *ids) for row in rows for ids in row["completion_ids"]}
    assert tally.scored == len(distinct)
    assert tally.reused == 4 * len(rows) - len(distinct)
    # A check that cannot fail would prove nothing: one wrong prompt token is seen.
    shifted = rows[0] | {"prompt_ids": rows[0]["prompt_ids"][:-1]}
    assert gap_of([shifted], large_world.model).branch > 100


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_batch_size_moves_no_token_by_more_than_rounding(
    large_world, some, tmp_path, attention
):
    """1 puts every branch into a batch of its own; sdpa packs trees, eager pads them."""
    results = []
    for budget in (16_384, 1, 300):
        how = {"budget": budget, "attention": attention}
        rows, tally = stored(large_world.model, some, tmp_path / f"{budget}", **how)
        assert tally.scored + tally.reused == 4 * SOME
        assert (tally.padding > 0) == (attention == "eager" and budget > 1)
        results.append([logp for row in rows for one in row["ref_token_logps"] for logp in one])
    for logps in results[1:]:
        assert np.abs(np.subtract(logps, results[0])).max() <= LEAST


def test_bfloat16_is_as_near_as_bfloat16_can_be(large_world, some, tmp_path):
    """bfloat16 keeps 8 bits: near its typical logits of 4 to 8 one step is 1/32 nat.

    The fused head rounds states and weights but no logit, the model's own head rounds each logit
    too. So a token may be off by a few steps, and in the mean over a branch by about one.
    """
    rows, _ = stored(large_world.model, some, tmp_path / "cache", dtype="bfloat16")
    own = gap_of(rows, large_world.model, torch.bfloat16)
    exact = gap_of(rows, large_world.model)
    assert own.mean_token <= 1 / 32
    assert own.token <= 4 / 32
    assert exact.mean_token <= 1 / 32
    assert exact.stored_sum <= SUM
