from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.rows import Tree
from support.stub_reference import StubReference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from align.schemas.rows import Reference

SCORER = StubReference().open()
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))
trees = st.builds(Tree, tokens, st.lists(tokens, max_size=3).map(tuple))


def score_one(prompt: NDArray[np.int32], branch: NDArray[np.int32]) -> NDArray[np.float32]:
    return SCORER.score([Tree(prompt, (branch,))])


@given(st.lists(trees, max_size=5))
def test_scores_do_not_depend_on_the_batch_or_the_tree(batch: list[Tree]) -> None:
    alone = [score_one(tree.prompt, branch) for tree in batch for branch in tree.branches]
    together = SCORER.score(batch)
    assert together.dtype == np.float32
    assert np.array_equal(together, np.concatenate([np.empty(0, np.float32), *alone]))


def test_a_token_is_scored_by_itself_and_the_one_before() -> None:
    prompt = np.array([5, 6], np.int32)
    first, second = score_one(prompt, np.array([7, 8], np.int32))
    assert score_one(np.array([6], np.int32), np.array([7], np.int32)) == [first]
    assert score_one(np.array([7], np.int32), np.array([8], np.int32)) == [second]
    assert first != second


def test_the_score_is_the_formula_of_the_hashed_pair() -> None:
    mixed = 41 * 0x9E3779B1 % 2**32 ^ (42 + crc32(b"stub")) % 2**32
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
    uniform = ((mixed ^ mixed >> 16) >> 8) / 2**24
    score = score_one(np.array([41], np.int32), np.array([42], np.int32)).item()
    assert score == pytest.approx(-6 * uniform**2 - 1 / 1024, abs=1e-6)


def test_scores_are_finite_negative_and_spread() -> None:
    ids = np.arange(10_000, dtype=np.int32)
    scores = score_one(ids[:1], ids)
    assert scores.max() < 0
    assert scores.min() > -6.01
    assert scores.mean() == pytest.approx(-2, abs=0.05)  # the mean of 6 u^2
    assert len(np.unique(scores)) > 9_900


def test_another_name_is_another_reference() -> None:
    first: Reference = StubReference()
    other: Reference = StubReference(name="other")
    tree = Tree(np.array([1], np.int32), (np.array([2], np.int32),))
    assert first.identity() != other.identity()
    assert first.identity() == StubReference().identity()
    assert first.open().score([tree]) != other.open().score([tree])
