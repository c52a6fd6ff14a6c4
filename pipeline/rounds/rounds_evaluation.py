"""Evaluation of a round: its policy's answers to held-out prompts against earlier policies'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.config import ModelOptions
from ...schemas.round_options import RoundsOptions
from ...schemas.round_record import Answering, HeldOut, RoundRecord, Versus
from ...schemas.score_gaps import ROUNDED
from ...stages.judge.win_rate import WinRate, win_rate
from ...stages.storage.run.rounds_folder import OneRound
from ...stages.storage.tables import TableFolder, read_table
from ...stages.tracking.progress import Progress
from ..tables.judge import judge
from ..tables.judges import kind_of
from ..tables.sample import sample
from .rounds_plan import RoundsJob

if TYPE_CHECKING:
    import polars as pl

WORDS = 4  # of an n-gram


def evaluate(job: RoundsJob, one: OneRound, *, progress: Progress) -> HeldOut | None:
    """Samples and judges answers to the held-out prompts; None where there are none.

    Answers and judgments that a round before has paid for are read.
    """
    if not job.split.held_out:
        return None
    folder, before = job.folder, job.folder.round(one.number - 1)
    _answer(job, job.first, folder.first_samples, progress)
    _answer(job, job.policy(one.number), one.eval_samples, progress)
    samples = (before.eval_samples if one.number > 1 else folder.first_samples, one.eval_samples)
    if kind_of(job.config.judge).compares:
        return _compared_by_judge(job, one, samples[0], progress)
    judged = (before.eval_judged if one.number > 1 else folder.first_judged, one.eval_judged)
    for answers, output in ((folder.first_samples, folder.first_judged), (samples[1], judged[1])):
        judge(job.judging(output), str(answers), progress=progress, sampler=job.judge_sampler)
    first, previous, policy = map(_judged, (folder.first_judged, *judged))
    return HeldOut(
        first=answering(first),
        policy=answering(policy),
        against_first=_versus(win_rate(policy, first)),
        against_previous=_versus(win_rate(policy, previous)),
    )


def _answer(job: RoundsJob, policy: ModelOptions, output: Path, progress: Progress) -> None:
    sample(job.held_out_sampling(policy, output), progress=progress)


def _compared_by_judge(
    job: RoundsJob, one: OneRound, previous: Path, progress: Progress
) -> HeldOut:
    """The judge is shown a sample of each; the model of the beginning may be both of them."""
    others = {one.against_first: job.folder.first_samples, one.against_previous: previous}
    for output, other in others.items():
        config = job.judging(output, against=str(other))
        judge(config, str(one.eval_samples), progress=progress, sampler=job.judge_sampler)
    first, policy = _sampled(job.folder.first_samples), _sampled(one.eval_samples)
    return HeldOut(
        first=answering(first),
        policy=answering(policy),
        against_first=_versus(win_rate(_judged(one.against_first))),
        against_previous=_versus(win_rate(_judged(one.against_previous))),
    )


def _judged(folder: Path) -> pl.DataFrame:
    return read_table(TableFolder(folder, "judged"))[1]


def _sampled(folder: Path) -> pl.DataFrame:
    return read_table(TableFolder(folder, "samples"))[1]


def _versus(found: WinRate) -> Versus:
    return Versus(found.rate, found.low, found.high, found.ties, found.n, found.unjudged)


def answering(samples: pl.DataFrame) -> Answering:
    """Means over samples, judged or not."""
    scores = samples["score"].drop_nulls().to_list() if "score" in samples.columns else []
    return Answering(
        samples=samples.height,
        mean_score=sum(scores) / len(scores) if scores else None,
        mean_tokens=sum(samples["completion_tokens"]) / samples.height,
        repeated=repeated_share(map(text_of, samples["completion"].to_list())),
        cut=sum(finish == "length" for finish in samples["finish"]) / samples.height,
    )


def text_of(completion: Any) -> str:
    """The text of a completion, which may be the one message of an assistant."""
    if isinstance(completion, str):
        return completion
    return str(completion[0].get("content") or "")


def repeated_share(texts: Iterable[str]) -> float:
    """The share of 4-grams of words that occur before in the same text; 0 where there is none."""
    total = repeated = 0
    for text in texts:
        found = Counter(_ngrams(text.split()))
        total += found.total()
        repeated += found.total() - len(found)
    return repeated / total if total else 0.0


def _ngrams(words: list[str]) -> Iterator[tuple[str, ...]]:
    for start in range(len(words) - WORDS + 1):
        yield tuple(words[start : start + WORDS])


def stop_reason(record: RoundRecord, options: RoundsOptions) -> str:
    """Why no round follows this one, in a sentence; empty where one may."""
    found = record.held_out
    if found is None:
        return ""
    rate, growth = found.against_previous.rate, found.length_growth
    if rate < options.min_win_rate:
        return (
            f"stopped after round {record.number}: its win rate against the policy before is "
            f"{rate:.3f}, below rounds.min_win_rate {options.min_win_rate:g}"
        )
    if options.max_length_growth and growth > options.max_length_growth * ROUNDED:
        return (
            f"stopped after round {record.number}: its samples are {growth:.2f} times as long as "
            f"those of the beginning, above rounds.max_length_growth {options.max_length_growth:g}"
        )
    return ""
