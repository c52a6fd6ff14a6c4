"""Widening a model for a while changes what it computes inside, and nothing after it."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from align.schemas.config import ModelOptions
from align.schemas.rows import OutOfMemory, Tree
from align.stages.model.reference import HfReference, held_in_float32

pytestmark = pytest.mark.numeric

TREE = Tree(np.array([3, 4, 5], np.int32), (np.array([6], np.int32), np.array([7, 8], np.int32)))


def scorer_of(folder, dtype):
    return HfReference(ModelOptions(path=str(folder), dtype=dtype)).open()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_model_scores_as_its_weights_do_in_float32(saved_llama, dtype):
    half = scorer_of(saved_llama, dtype)
    before = half.score([TREE])
    with half.in_float32():
        inside = half.score([TREE])
    full = scorer_of(saved_llama, "float32")  # its weights are the same, stored in bfloat16
    assert np.abs(inside - full.score([TREE])).max() < 1e-4 < np.abs(inside - before).max()
    assert half.score([TREE]).tobytes() == before.tobytes()


@pytest.mark.parametrize("error", [None, KeyError])
def test_the_very_same_tensors_are_back_afterwards(llama, error):
    model = llama.to(torch.bfloat16)
    every = [*model.parameters(), *model.buffers()]
    before = [(tensor.dtype, tensor.data_ptr()) for tensor in every]
    expected = pytest.raises(error) if error else nullcontext()
    with expected, held_in_float32(model):
        assert {tensor.dtype for tensor in every} == {torch.float32}
        if error:
            raise error
    assert [(tensor.dtype, tensor.data_ptr()) for tensor in every] == before


def test_a_model_in_float32_is_left_as_it_is(llama):
    before = [tensor.data_ptr() for tensor in llama.parameters()]
    with held_in_float32(llama):
        assert [tensor.data_ptr() for tensor in llama.parameters()] == before


def test_weights_too_large_for_float32_ask_for_a_smaller_batch(saved_llama):
    scorer = scorer_of(saved_llama, "bfloat16")
    huge = torch.zeros(1, dtype=torch.bfloat16).expand(1 << 50)  # takes two bytes until it is cast
    scorer.model.register_buffer("huge", huge)
    weight = next(scorer.model.parameters())
    with pytest.raises(OutOfMemory, match="no room for the weights"), scorer.in_float32():
        pytest.fail("came in")
    assert weight.dtype == torch.bfloat16
