"""Prompts that stand on both sides of a split, or nearly so."""

import dataclasses

import numpy as np
import pytest

from align.schemas.row_keys import sketches_of
from align.schemas.rows import PromptKeys
from align.stages.feed import train_source
from align.stages.feed.train_source import Overlap, count_near, overlap
from support.shard_cache import block_of, opened, write_cache

OTHERS = [f"Tell me about {word}, please, in {word} words" for word in "abcdefghijklmnop"]
HELD, LEARNED = 0, 2**64 - 1  # split keys that are held out at any fraction, and at none


def with_prompts(texts, sides):
    """A cache in which these are the prompts; the texts decide the sketch, `sides` the side."""
    block = block_of(len(texts))
    keys = np.array(sides, dtype=np.uint64)
    sketches = sketches_of(texts, otherwise=keys)
    found = PromptKeys(block.rows.prompt_keys.prompt, keys, sketches)
    return dataclasses.replace(block, rows=dataclasses.replace(block.rows, prompt_keys=found))


QUESTION = "Why is the sky blue in the morning and red in the evening, and what makes it so?"


def test_held_out_prompts_that_are_nearly_learned_from_are_counted(tmp_path):
    texts = [QUESTION, *OTHERS, QUESTION.upper(), f"{QUESTION} Thanks!", "Something else entirely"]
    sides = [LEARNED - place for place in range(17)] + [HELD, HELD + 1, HELD + 2]
    source = opened(write_cache(tmp_path / "a", [with_prompts(texts, sides)]), eval_fraction=0.5)
    assert overlap(source, source) == Overlap(held_out=3, shared=0, near=2)


def test_prompts_of_another_cache_are_shared_near_or_new(tmp_path):
    texts, sides = [QUESTION, *OTHERS], list(range(17))
    source = opened(write_cache(tmp_path / "a", [with_prompts(texts, sides)]))
    measured = [QUESTION, QUESTION.upper(), "Something else entirely", OTHERS[3], OTHERS[3]]
    block = with_prompts(measured, [0, 100, 101, 4, 4])
    other = opened(write_cache(tmp_path / "b", [block]), eval_fraction=1.0)
    assert overlap(source, other) == Overlap(held_out=4, shared=2, near=1)


@pytest.mark.parametrize("differing", [(), (0,), (0, 7), (1, 2), (3, 6), (2, 5), (0, 3, 6)])
def test_two_bytes_may_differ_wherever_they_are(differing):
    draw = np.random.default_rng(0)
    others = np.frombuffer(draw.bytes(8 * 1000), dtype=np.uint64)
    changed = others[500:501].copy()
    for place in differing:
        changed.view(np.uint8)[place] ^= 0x55
    assert count_near(changed, others) == (len(differing) <= 2)


def test_the_bands_are_searched_as_if_all_were_compared_with_all(monkeypatch):
    draw = np.random.default_rng(1)  # bytes of two values: most pairs have a band in common
    first, others = (draw.integers(0, 2, (count, 8)).astype(np.uint8) for count in (60, 90))
    equal = (first[:, None] == others).sum(axis=2)
    expected = int((equal >= train_source.NEAR).any(axis=1).sum())
    assert expected > 0
    assert count_near(first.view(np.uint64).ravel(), others.view(np.uint64).ravel()) == expected
    monkeypatch.setattr(train_source, "MOST_COMPARED", 1)
    fewer = count_near(first.view(np.uint64).ravel(), others.view(np.uint64).ravel())
    assert fewer <= expected
    none, some = np.empty(0, np.uint64), np.arange(3, dtype=np.uint64)
    assert (count_near(none, some), count_near(some, none)) == (0, 0)
