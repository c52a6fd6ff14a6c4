"""Rows without files, and the slow way to score them."""

import numpy as np
import pytest

from align.schemas.columns import Ragged
from align.schemas.rows import Tree
from align.stages.data.row_keys import key_rows
from align.stages.score.score import KnownScores, ScoringRules, score_shard
from support.encoded_rows import encoded
from support.faulty_scorer import STUB


@pytest.fixture
def score():
    """Scores a block of rows; nothing is known of them unless said."""

    def call(rows, scorer, *, budget=64, known=None, keep=True, heard=None):
        count = len(rows.completions)
        nothing = KnownScores(
            found=np.zeros(count, dtype=np.bool_),
            token_logps=Ragged.of([[]] * count, np.float32) if keep else None,
            logps=np.zeros(count),
            numerics={},
        )
        heard = [] if heard is None else heard
        return score_shard(
            rows,
            known or nothing,
            ScoringRules(tokens_per_batch=budget, hidden_size=64, keep_token_logps=keep),
            scorer=lambda: scorer,
            on_batch=lambda batch: heard.append((batch.tokens, batch.padding)),
        )

    return call


@pytest.fixture
def rows():
    """Forty rows with two or three completions; some neighbours have one prompt."""
    random = np.random.default_rng(0)
    records = []
    for row in range(40):
        prompt = [3 + row // 2, *range(4, 4 + (row // 2) % 7)]
        sizes = random.integers(1, 12, 2 + row % 2)
        records.append(encoded(prompt, *(random.integers(10, 90, n) for n in sizes), row=row))
    return key_rows(records, carried=()).in_key_order()


@pytest.fixture
def one_by_one():
    """Each completion's token log-probs by the stub, one completion at a time."""

    def call(rows):
        return [
            STUB.score([Tree(rows.prompts[row], (rows.completions[completion],))])
            for row in range(len(rows))
            for completion in range(rows.completion_offsets[row], rows.completion_offsets[row + 1])
        ]

    return call
