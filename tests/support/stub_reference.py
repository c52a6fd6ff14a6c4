"""A reference without a model: log-probabilities from a hash of two neighbouring tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from align.schemas.columns import Ragged

_NO_TOKEN = -1  # stands before the first completion token when the prompt is empty


def _nothing(*_):
    """Happens."""


@dataclass(frozen=True)
class StubReference:
    """Scores any tokens at once; another name gives other scores and another identity."""

    name: str = "stub"
    opening: Callable = _nothing  # what happens before it is opened
    scoring: Callable = _nothing  # and before a batch is scored, which is given

    def identity(self):
        """What makes the scores: the name and this rule's version."""
        return {"model": self.name, "rule": "hashed-pairs-1", "dtype": "float32"}

    def hidden_size(self):
        """A width that planners may count with."""
        return 64

    def open(self):
        """There is nothing to load."""
        self.opening()
        return StubScorer(crc32(self.name.encode()), self.scoring)


@dataclass(frozen=True)
class StubScorer:
    """log p(token | previous token) = -6 u^2 - 1/1024, with u in [0, 1) hashed from the pair."""

    salt: int
    scoring: Callable
    pads: bool = False

    def launch(self, trees):
        """There is nothing to wait for."""
        values = self.score(trees)
        return lambda: values

    def score(self, trees):
        """Scores one batch: every completion token, in the order tree, branch, token."""
        self.scoring(trees)
        branches = Ragged.of([branch for tree in trees for branch in tree.branches], np.int32)
        filled = branches.lengths > 0
        previous = np.empty_like(branches.values)
        previous[1:] = branches.values[:-1]
        previous[branches.offsets[:-1][filled]] = _last_prompt_tokens(trees)[filled]
        return _hashed_logps(previous, branches.values, self.salt)

    def describe(self):
        """There is only one way to score."""
        return {"path": "stub"}


def _last_prompt_tokens(trees):
    lasts = [tree.prompt[-1] if len(tree.prompt) else _NO_TOKEN for tree in trees]
    return np.repeat(np.array(lasts, dtype=np.int32), [len(tree.branches) for tree in trees])


def _hashed_logps(previous, tokens, salt):
    mixed = previous.astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed ^= tokens.astype(np.uint32) + np.uint32(salt)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    uniform = (mixed >> np.uint32(8)).astype(np.float32)  # 24 bits fit a float32 exactly
    uniform *= np.float32(2.0**-24)
    uniform *= uniform
    uniform *= np.float32(-6)
    uniform -= np.float32(2.0**-10)
    return uniform


class Liar:
    """Claims to be the model, and scores as the stub does."""

    def __init__(self, options):
        # It imports torch, which the stub does without.
        from align.stages.model.reference import HfReference  # noqa: PLC0415

        honest = HfReference(options)
        self.identity, self.hidden_size = honest.identity, honest.hidden_size
        self.open = StubReference().open
