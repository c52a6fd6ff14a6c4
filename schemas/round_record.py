"""The record of a finished round: its inputs, its outputs, and their evaluation."""

from __future__ import annotations

from dataclasses import dataclass

ROUND_FORMAT = 1


@dataclass(frozen=True)
class Answering:
    """Statistics of a policy's samples for the held-out prompts."""

    samples: int
    mean_score: float | None  # None if the judge only compares
    mean_tokens: float
    repeated: float  # the fraction of 4-grams of words that occur before in the same sample
    cut: float  # the fraction of samples cut at sample.max_new_tokens


@dataclass(frozen=True)
class Versus:
    """The win rate of a round's policy against another, on the held-out prompts."""

    rate: float
    low: float  # of a 95 % bootstrap interval over prompts
    high: float
    ties: float  # the fraction of comparisons without a winner
    comparisons: int
    unjudged: int


@dataclass(frozen=True)
class HeldOut:
    """The evaluation on held-out prompts after a round."""

    first: Answering  # the initial model
    policy: Answering
    against_first: Versus
    against_previous: Versus

    @property
    def length_growth(self) -> float:
        """The ratio of the mean tokens of the policy's samples to the initial model's."""
        return self.policy.mean_tokens / max(self.first.mean_tokens, 1.0)


@dataclass(frozen=True)
class RoundRecord:
    """The content of one `round.json`."""

    format_version: int
    number: int  # from 1
    made_from: dict[str, str]  # digests of policy, reference, prompts and the judge's files
    settings: dict[str, str]  # all that it depends on, by their dotted names
    made: dict[str, str]  # the roots of samples, judged, selected and cache; the model's digest
    counts: dict[str, int]
    trained: dict[str, float]  # the last metrics of the training
    held_out: HeldOut | None  # None where no prompts are held out
