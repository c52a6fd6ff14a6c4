"""Evaluates a round: compares its policy's answers to held-out prompts with earlier policies'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...schemas.round_options import RoundsOptions
from ...stages.judge.win_rate import win_rate
from ...stages.storage.tables import TableFolder, read_table
from ...stages.tracking.progress import Progress
from ..options.settings import changed
from ..tables.judge import judge
from .rounds_checks import Rounds

if TYPE_CHECKING:
    import polars as pl

WORDS = 4  # per n-gram


def evaluate(rounds: Rounds, number: int, *, progress: Progress) -> dict[str, float]:
    """Judges a policy's answers to the held-out prompts, sampled before; returns the metrics."""

    def sampled(round_number: int) -> pl.DataFrame:
        folder = rounds.folder(round_number) / "eval-samples"
        return read_table(TableFolder(folder, "samples"))[1]

    def judged(round_number: int, name: str, against: str = "") -> pl.DataFrame:
        folder = rounds.folder(round_number)
        samples, output = folder / "eval-samples", folder / name
        settings = {"judge.output": str(output), "judge.against": against}
        config = changed(rounds.config, {**settings, "tokens.chat_template": ""})
        judge(config, str(samples), progress=progress, sampler=rounds.sampler)
        return read_table(TableFolder(output, "judged"))[1]

    compares = rounds.config.judge.by == "pairwise"
    ours = sampled(number) if compares else judged(number, "eval-judged")
    metrics = sample_means(ours)
    metrics["length_growth"] = metrics["tokens"] / max(sample_means(sampled(0))["tokens"], 1.0)
    others = {"first": 0, "previous": number - 1} if number else {}
    for name, other in others.items():
        if compares:
            against = str(rounds.folder(other) / "eval-samples")
            versus = win_rate(judged(number, f"eval-against-{name}", against))
        else:
            versus = win_rate(ours, judged(other, "eval-judged"))
        metrics[f"win_rate/{name}"] = versus.rate
        metrics[f"win_rate/{name}/low"] = versus.low
        metrics[f"win_rate/{name}/high"] = versus.high
        metrics[f"ties/{name}"] = versus.ties
        metrics[f"comparisons/{name}"] = float(versus.n)
        metrics[f"unjudged/{name}"] = float(versus.unjudged)
    return {f"held_out/{name}": value for name, value in metrics.items()}


def sample_means(samples: pl.DataFrame) -> dict[str, float]:
    """The number of samples, and their mean score, tokens, repetition and truncation."""
    scores = samples["score"].drop_nulls().to_list() if "score" in samples.columns else []
    texts = (
        one if isinstance(one, str) else str(one[0].get("content") or "")
        for one in samples["completion"].to_list()
    )
    return {
        **({"score": sum(scores) / len(scores)} if scores else {}),
        "samples": float(samples.height),
        "tokens": sum(samples["completion_tokens"]) / samples.height,
        "repeated_ngrams": repeated_share(texts),
        "cut": sum(finish == "length" for finish in samples["finish"]) / samples.height,
    }


def repeated_share(texts: Iterable[str]) -> float:
    """The share of word 4-grams that occur earlier in the same text; 0 without any 4-gram."""
    total = repeated = 0
    for text in texts:
        words = text.split()
        starts = range(len(words) - WORDS + 1)
        ngrams = Counter(tuple(words[start : start + WORDS]) for start in starts)
        total += ngrams.total()
        repeated += ngrams.total() - len(ngrams)
    return repeated / total if total else 0.0


def stop_reason(number: int, metrics: Mapping[str, float], options: RoundsOptions) -> str:
    """The reason to stop after a round with these metrics; empty if there is none."""
    after = f"stopped after round {number}:"
    rate = metrics.get("held_out/win_rate/previous", 1.0)
    if rate < options.min_win_rate:
        bound = f"rounds.min_win_rate {options.min_win_rate:g}"
        return f"{after} its win rate against the previous policy is {rate:.3f}, below {bound}"
    growth = metrics.get("held_out/length_growth", 0.0)
    if 0 < options.max_length_growth * (1 + 1e-9) < growth:
        bound = f"rounds.max_length_growth {options.max_length_growth:g}"
        return f"{after} its samples have {growth:.2f} times the first length, above {bound}"
    return ""
