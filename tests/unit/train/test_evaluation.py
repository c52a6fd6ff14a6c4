"""An evaluation is one batch: how it is cut changes no number, and each is its formula's.

Before the first step the policy is measured by the log-probs of its cache.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from align.pipeline.train.train import evaluated
from align.schemas.errors import FingerprintError
from align.stages.engine.distributed import joined_world
from align.stages.methods.table import METHODS
from align.stages.train.evaluation import largest_gap
from support import plain_loop
from support.refusals import refuses
from support.rounding import NATS
from support.training_world import START, job_of, session_of

pytestmark = pytest.mark.numeric

REWARD = 0.1 * NATS  # beta times it
HELD_OUT = {"eval_fraction": 0.4, "eval_table": 9}
STATE = {"bco": (40.0, 0.3)}  # as after some steps of training
# Options under which a loss asks something more of its whole evaluation.
OPTIONS = {
    "orpo": {"nll_scope": "global_tokens"},
    "grpo": {"normalize": "sequence"},
    "kto": {"kl_per_step": 3},
}
KINDS = (*OPTIONS, "bco", "aot", "ppo", "reward")


@pytest.fixture(scope="session")
def measured(training_world, moved):
    """What a method measures on held-out rows, cut to batches of so many."""

    def measure(cache, method, sizes, *, options=None, names=("",), **settings):
        folder = getattr(training_world, cache)
        with joined_world() as world:
            how = {"model": str(moved), "other_reference": True, **HELD_OUT, **settings}
            job = job_of(folder, method, options=options, **how)
            session = session_of(job, world)
            recorded, feed = session.records, session.feed
            for size in sizes:
                cut = replace(feed.settings, batch_size=size)
                session.feed = replace(feed, settings=cut)
                evaluated(session, replace(START, methods=STATE))
            session.feed = feed
            rows = []
            for name in names:
                with session.feed.held_out(name) as batches:
                    micros = [micro for batch in batches for micro in batch.own]
                rows += [row for micro in micros for row in micro.row_ids]
        return [metrics for _, metrics in recorded.evaluations], recorded.samples, rows

    return measure


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in KINDS else pytest.mark.long) for name in METHODS],
)
def test_no_number_of_an_evaluation_depends_on_how_it_is_cut(measured, method):
    once, other = measured("everything", method, (64, 3), options=OPTIONS.get(method))[0]
    assert math.isfinite(once["eval/loss"])
    assert other == pytest.approx(once, rel=1e-5, abs=NATS)


def test_micro_batches_change_no_number_and_a_limit_still_counts_batches(measured):
    (whole,), _, _ = measured("pairs", "kto", (64,))
    (cut,), _, _ = measured("pairs", "kto", (64,), tokens_per_batch=1)
    assert cut == pytest.approx(whole, rel=1e-5, abs=NATS)
    (few,), samples, _ = measured("pairs", "kto", (3,), limit_eval_batches=2)
    assert few["eval/kl/pairs"] == 2 * 3 * 2  # rows and their completions
    assert {one.row for one in samples[0]} == set(range(6))


@pytest.fixture(scope="session")
def oracle(training_world, moved, measured):
    """Of each held-out row, by both models in float64, for each own completion of it:

    whether it is good, its tokens, its log-ratio, and that of its first mismatched partner.
    """
    _, _, rows = measured("pairs", "dpo", (64,))
    assert 10 < len(rows) == len(set(rows))
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in (moved, training_world.model)
    ]
    stored = plain_loop.rows_of(training_world.pairs)
    with torch.no_grad():
        return [completions_of(plain_loop.Row(stored[row], *models)) for row in rows]


def completions_of(row):
    lengths, own = [len(ids) for ids in row.row["completion_ids"]], len(row.own)
    return [
        (good, lengths[i], float(row.ratio(i)), float(row.ratio(i + own)))
        for i, good in enumerate(row.is_good)
    ]


def mean(values):
    return math.fsum(values) / len(values)


def s(x):
    return 1 / (1 + math.exp(-x))


def ls(x):
    return float(logsigmoid(torch.tensor(x, dtype=torch.float64)))


def test_kto_is_measured_from_one_reference_point_of_all_held_out_rows(measured, oracle):
    completions = [completion for row in oracle for completion in row]
    ratios = [kl for *_, kl in completions]
    z = max(0.0, mean(ratios))
    loss = mean([1 - s(0.1 * ((r - z) if good else (z - r))) for good, _, r, _ in completions])
    up, down = (
        [0.1 * r for is_good, _, r, _ in completions if is_good == of] for of in (True, False)
    )
    right = mean([float(one > other) for one, other in zip(up, down, strict=True)])
    for found in measured("pairs", "kto", (64, 2))[0]:
        assert found["eval/kl/raw"] == pytest.approx(mean(ratios), abs=NATS)
        assert found["eval/kl/clamped"] == pytest.approx(z, abs=NATS)
        assert found["eval/kl/pairs"] == len(ratios)
        assert found["eval/loss"] == pytest.approx(loss, abs=REWARD)
        assert found["eval/rewards/chosen"] == pytest.approx(mean(up), abs=REWARD)
        assert found["eval/rewards/margins"] == pytest.approx(mean(up) - mean(down), abs=REWARD)
        assert found["eval/rewards/accuracies"] == pytest.approx(right)
    pairs = [ratios[place : place + 4] for place in range(0, len(ratios), 4)]
    clamped = mean([max(0.0, mean(few)) for few in pairs])
    assert abs(clamped - z) > 0.02  # so that batches of two rows would give another mean


def test_each_of_several_sets_has_its_own_reference_point(measured, training_world):
    how = {"eval_fraction": 0.0}
    caches = {"a": training_world.pairs, "b": training_world.everything}
    both = [f"{name}={cache}" for name, cache in caches.items()]
    (found,), samples, _ = measured("pairs", "kto", (64,), eval_cache=both, names=caches, **how)
    for name, cache in caches.items():
        (alone,), own, _ = measured("pairs", "kto", (64,), eval_cache=str(cache), **how)
        prefix = f"eval/{name}/"
        assert {one: value for one, value in found.items() if one.startswith(prefix)} == {
            f"{prefix}{one.removeprefix('eval/')}": value for one, value in alone.items()
        }
        assert [one for one in samples[0] if one.set == name] == [
            replace(one, set=name) for one in own[0]
        ]


def test_bco_is_measured_from_the_mean_that_training_left(measured, oracle):
    signed = [0.1 * r - 0.3 if good else 0.3 - 0.1 * r for row in oracle for good, _, r, _ in row]
    for found in measured("pairs", "bco", (64, 3))[0]:
        assert found["eval/loss"] == pytest.approx(mean([-ls(one) for one in signed]), abs=REWARD)
        assert found["eval/bco/delta"] == pytest.approx(0.3)


def test_means_per_token_are_measured_and_reported_as_such(measured, oracle):
    """By ipo, whose loss is (gap - 1 / 2 beta)^2."""
    sides = [[r / n for _, n, r, _ in row] for row in oracle]
    gaps = [up - down for up, down in sides]
    (found,), samples, _ = measured("pairs", "ipo", (4,))
    assert found["eval/loss"] == pytest.approx(mean([(gap - 5) ** 2 for gap in gaps]), rel=1e-5)
    up = 0.1 * mean([up for up, _ in sides])
    assert found["eval/rewards/chosen"] == pytest.approx(up, abs=NATS)
    assert found["eval/rewards/margins"] == pytest.approx(0.1 * mean(gaps), abs=NATS)
    assert found["eval/rewards/accuracies"] == pytest.approx(mean([float(gap > 0) for gap in gaps]))
    rewards = [one.reward for one in samples[0]]
    assert rewards == pytest.approx([0.1 * side for row in sides[:9] for side in row], abs=NATS)


@pytest.fixture
def session(training_world, one_rank):
    return session_of(job_of(training_world.pairs, "kto"), one_rank)


def test_the_reference_agrees_with_its_cache_or_is_refused_by_shard_and_row(session):
    # Of several shards.
    sample = list(session.cache.sample_rows(session.manifest, 8))
    assert largest_gap(session.engine, sample, "float32", "float32") < 1e-4
    (first, (name, block), *others) = sample
    for by in (0.05, -0.05, math.nan, math.inf):  # one completion of the second shard
        logps = block.logps.copy()
        logps[-1] += by
        changed = [first, (name, block.with_columns(ref_logp=logps)), *others]
        with refuses(FingerprintError, name, f"row {block.row[-1]} "):
            largest_gap(session.engine, changed, "float32", "float32")
        if by == 0.05:  # in 16 bits both may be further apart
            gap = largest_gap(session.engine, changed, "bfloat16", "float32")
            assert gap == pytest.approx(0.05, abs=1e-3)
