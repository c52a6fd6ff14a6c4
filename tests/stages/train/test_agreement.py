from dataclasses import replace

import pytest

from align.schemas.errors import FingerprintError
from align.stages.storage.verify_cache import sample_rows
from align.stages.train.evaluation import largest_gap
from support.training_world import job_of, session_of

pytestmark = pytest.mark.numeric


@pytest.fixture
def session(training_world, one_rank):
    return session_of(job_of(training_world.pairs, "kto"), one_rank)


@pytest.fixture
def sample(session):
    """Eight rows of several shards."""
    return list(sample_rows(session.job.cache, session.job.manifest, 8))


def spoiled(sample, by):
    """The sample, one branch of its second shard changed; also the shard, and the input row."""
    (first, (name, block), *others) = sample
    logps = block.logps.copy()
    logps[-1] += by
    changed = [first, (name, replace(block, logps=logps)), *others]
    return changed, name, block.rows.row[-1]


def test_the_reference_itself_agrees_with_its_cache(session, sample):
    assert len(sample) > 1
    assert largest_gap(session.engine, sample, "float32", "float32") < 1e-4


@pytest.mark.parametrize("by", [0.05, -0.05, float("nan"), float("inf")])
def test_another_number_in_the_cache_is_refused_by_shard_and_row(session, sample, by):
    changed, name, row = spoiled(sample, by)
    with pytest.raises(FingerprintError, match=rf"{name}: .* input row {row} as -") as refusal:
        largest_gap(session.engine, changed, "float32", "float32")
    assert refusal.value.exit_code == 4


def test_bfloat16_is_allowed_what_float32_is_not(session, sample):
    changed, _, _ = spoiled(sample, 0.05)
    assert largest_gap(session.engine, changed, "bfloat16", "float32") == pytest.approx(
        0.05, abs=1e-3
    )


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_ties_are_what_rounding_makes_in_the_dtype_that_is_trained(
    training_world, one_rank, dtype, rounding
):
    session = session_of(job_of(training_world.pairs, "dpo", dtype=dtype), one_rank)
    assert session.recipe.rounding == pytest.approx(rounding)
