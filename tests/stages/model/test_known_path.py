"""How a resumed run under ZeRO-3 scores, which it does not probe again."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from align.pipeline.resume import known_path, made_with
from support.training_world import job_of, session_of


@pytest.mark.parametrize(("attention", "is_known"), [("auto", True), ("sdpa", False)])
def test_flexattention_is_not_kept_against_the_setting(
    training_world, one_rank, attention, is_known
):
    job = job_of(training_world.pairs, "dpo")
    begun = SimpleNamespace(made_with=made_with(session_of(job, one_rank)) | {"layout": "flex"})
    job = dataclasses.replace(job, policy=dataclasses.replace(job.policy, attention=attention))
    assert (known_path(begun, job, torch.device("cpu")) is not None) == is_known
