"""What scoring and learning hold at once does not grow with vocabulary times tokens."""

import json

import pytest

from support.programs import run_program

pytestmark = pytest.mark.long  # that no such tensor is made is in stages/model/test_fused_head


@pytest.fixture(scope="module")
def peaks():
    answer = run_program("memory_growth", "16384", "65536")
    return json.loads(answer.stdout.splitlines()[-1])


def test_four_times_the_vocabulary_needs_no_more_memory_to_score(peaks):
    small, large = peaks["align"]
    assert large <= 1.25 * small, peaks
    # The same measurement sees the logits: 2,048 positions of 65,536 float32 are 512 MiB.
    logits_small, logits_large = peaks["logits"]
    assert logits_large >= 3.5 * logits_small, peaks
    assert logits_large >= 512 + 256, peaks  # and their softmax over the completions
    assert large <= logits_large / 8, peaks


def test_four_times_the_vocabulary_needs_no_more_memory_to_learn(peaks):
    small, large = peaks["training, frozen head"]
    assert large <= 1.25 * small, peaks
    # A head that learns has a gradient as large as itself: 64 float32 per word, 4 and 16 MiB. So
    # has the embedding that it is tied to, and for a moment there is their sum.
    small, large = peaks["training"]
    assert large - small <= 3 * (16 - 4), peaks
    logits_small, logits_large = peaks["training with logits"]
    assert logits_large >= 3.5 * logits_small, peaks
    assert large <= logits_large / 8, peaks
