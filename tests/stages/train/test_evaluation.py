"""An evaluation is one batch: how it is cut changes no number, and each is its formula's."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from align.schemas.rows import Role
from align.stages.engine.distributed import joined_world
from align.stages.methods.table import METHODS
from align.stages.train.synchronized import StopConditions
from support import plain_loop
from support.rounding import NATS
from support.training_ranks import TABLE
from support.training_world import START, Recorded, job_of, loop_of, session_of

pytestmark = pytest.mark.numeric

REWARD = 0.1 * NATS  # beta times it
NEVER = StopConditions(lambda: False, math.inf)
HELD_OUT = {"eval_fraction": 0.4, "eval_table": 9}
STATE = {"bco": (40.0, 0.3)}  # as after some steps of training
# Options under which a loss asks something more of its whole step.
OPTIONS = {
    "orpo": {"nll_scope": "global_tokens"},
    "cpo": {"nll_scope": "global_tokens"},
    "grpo": {"normalize": "sequence"},
    "kto": {"kl_per_step": 3},
    "kto_logsigmoid": {"kl_use": "all"},
}


@pytest.fixture(scope="session")
def moved(training_world, tmp_path_factory):
    """A policy some nats away from the reference, to either side."""
    folder = tmp_path_factory.mktemp("moved")
    for path in training_world.model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    drawn = torch.Generator().manual_seed(5)
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=drawn)
        for name, weight in sorted(weights.items())
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def measured(training_world, moved):
    """What a method measures on held-out rows, cut to batches of so many."""

    def measure(cache, method, sizes, *, options=None, **settings):
        folder = getattr(training_world, cache)
        with joined_world() as world:
            how = {"model": str(moved), "other_reference": True, **HELD_OUT, **settings}
            job = job_of(folder, method, options=options, **how)
            session = session_of(job, world)
            recorded = Recorded()
            for size in sizes:
                loop = loop_of(session)
                cut = replace(session.feed.settings, batch_size=size)
                loop.feed = replace(session.feed, settings=cut)
                loop.measure(replace(START, state=STATE), recorded, NEVER)
            with session.feed.held_out() as batches:
                rows = [row for batch in batches for micro in batch.own for row in micro.row_ids]
        return [metrics for _, metrics in recorded.evaluations], recorded.samples, rows

    return measure


# What a loss asks of the whole evaluation, by the kinds of `training_ranks` and these options.
KINDS = {*OPTIONS, *TABLE, "dpo"} & METHODS.keys()


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in KINDS else pytest.mark.long) for name in METHODS],
)
def test_no_number_of_an_evaluation_depends_on_how_it_is_cut(measured, method):
    once, *others = measured("everything", method, (64, 2, 5), options=OPTIONS.get(method))[0]
    assert math.isfinite(once["eval/loss"])
    for other in others:
        assert other == pytest.approx(once, rel=1e-5, abs=NATS)


def test_the_micro_batches_of_an_evaluation_change_no_number(measured):
    (whole,), _, _ = measured("pairs", "kto", (64,))
    (cut,), _, _ = measured("pairs", "kto", (64,), tokens_per_batch=1)
    assert cut == pytest.approx(whole, rel=1e-5, abs=NATS)


def test_a_limit_still_counts_batches(measured):
    (few,), samples, _ = measured("pairs", "kto", (3,), limit_eval_batches=2)
    assert few["eval/kl/pairs"] == 2 * 3 * 2  # rows and their branches
    assert {one.row for one in samples[0]} == set(range(6))


class Oracle:
    """The held-out rows of a cache under both models, one row at a time, in float64."""

    def __init__(self, training_world, policy, cache, rows):
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            for folder in (policy, training_world.model)
        ]
        stored = plain_loop.rows_of(cache)
        with torch.no_grad():
            self.rows = [self._row(plain_loop.Row(stored[row], *models)) for row in rows]

    def _row(self, row):
        """Of each own branch: whether it is good, its tokens, r, and r of its first mismatch."""
        own = len(row.own)
        return [
            (
                good,
                len(row.row["completion_ids"][i]),
                float(row.ratio(i)),
                float(row.ratio(i + own)),
            )
            for i, good in enumerate(row.is_good)
        ]

    def branches(self):
        return [branch for row in self.rows for branch in row]


def mean(values):
    return math.fsum(values) / len(values)


def s(x):
    return 1 / (1 + math.exp(-x))


def ls(x):
    return float(logsigmoid(torch.tensor(x, dtype=torch.float64)))


@pytest.fixture(scope="session")
def oracle(training_world, moved, measured):
    _, _, rows = measured("pairs", "dpo", (64,))
    assert 10 < len(rows) == len(set(rows))
    return Oracle(training_world, moved, training_world.pairs, rows)


def kto(oracle, z):
    losses = [
        1 - s(0.1 * (r - z)) if good else 1 - s(0.1 * (z - r))
        for good, _, r, _ in oracle.branches()
    ]
    return mean(losses)


def test_kto_is_measured_from_one_reference_point_of_all_held_out_rows(measured, oracle):
    ratios = [kl for *_, kl in oracle.branches()]
    z = max(0.0, mean(ratios))
    for found in measured("pairs", "kto", (64, 2))[0]:
        assert found["eval/kl/raw"] == pytest.approx(mean(ratios), abs=NATS)
        assert found["eval/kl/clamped"] == pytest.approx(z, abs=NATS)
        assert found["eval/kl/pairs"] == len(ratios)
        assert found["eval/loss"] == pytest.approx(kto(oracle, z), abs=REWARD)
    pairs = [ratios[place : place + 4] for place in range(0, len(ratios), 4)]
    clamped = mean([max(0.0, mean(few)) for few in pairs])
    assert abs(clamped - z) > 0.02  # so that batches of two rows would give another mean


def test_kto_reports_beta_r_of_either_label(measured, oracle):
    (found,), _, _ = measured("pairs", "kto", (5,))
    good = [0.1 * r for is_good, _, r, _ in oracle.branches() if is_good]
    bad = [0.1 * r for is_good, _, r, _ in oracle.branches() if not is_good]
    assert found["eval/rewards/chosen"] == pytest.approx(mean(good), abs=REWARD)
    assert found["eval/rewards/margins"] == pytest.approx(mean(good) - mean(bad), abs=REWARD)
    right = mean([float(up > down) for up, down in zip(good, bad, strict=True)])
    assert found["eval/rewards/accuracies"] == pytest.approx(right)


def test_bco_is_measured_from_the_mean_that_training_left(measured, oracle):
    for found in measured("pairs", "bco", (64, 3))[0]:
        losses = [
            -ls(0.1 * r - 0.3) if good else -ls(0.3 - 0.1 * r)
            for good, _, r, _ in oracle.branches()
        ]
        assert found["eval/loss"] == pytest.approx(mean(losses), abs=REWARD)
        assert found["eval/bco/delta"] == pytest.approx(0.3)


@pytest.mark.parametrize(("method", "beta"), [("ipo", 0.1), ("dpo_norm", 5.0)])
def test_means_per_token_are_measured_and_reported_as_such(measured, oracle, method, beta):
    sides = [[r / n for _, n, r, _ in row] for row in oracle.rows]
    gaps = [up - down for up, down in sides]
    losses = {
        "ipo": [(gap - 1 / (2 * beta)) ** 2 for gap in gaps],
        "dpo_norm": [-ls(beta * gap) for gap in gaps],
    }
    (found,), samples, _ = measured("pairs", method, (4,))
    assert found["eval/loss"] == pytest.approx(mean(losses[method]), rel=1e-5)
    assert found["eval/rewards/chosen"] == pytest.approx(
        beta * mean([up for up, _ in sides]), abs=NATS
    )
    assert found["eval/rewards/margins"] == pytest.approx(beta * mean(gaps), abs=NATS)
    assert found["eval/rewards/accuracies"] == pytest.approx(mean([float(gap > 0) for gap in gaps]))
    by_sums = mean([up - down for (_, _, up, _), (_, _, down, _) in oracle.rows])
    assert found["eval/rewards/margins"] != pytest.approx(beta * by_sums, rel=0.1)
    rewards = [one.reward for one in samples[0]]
    assert rewards == pytest.approx([beta * side for row in sides[:9] for side in row], abs=NATS)
    assert {one.role for one in samples[0]} == {Role.CHOSEN, Role.REJECTED}
