"""Measures of a round: its policy's answers to held-out prompts against earlier policies'."""

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

WORDS = 4  # of an n-gram


def evaluate(rounds: Rounds, number: int, *, progress: Progress) -> dict[str, float]:
    """Judges the answers of a round's policy to the held-out prompts, which are sampled by now."""

    def sampled(of: int) -> pl.DataFrame:
        return read_table(TableFolder(rounds.folder(of) / "eval-samples", "samples"))[1]

    def judged(of: int, name: str, against: str = "") -> pl.DataFrame:
        samples, output = rounds.folder(of) / "eval-samples", rounds.folder(of) / name
        settings = {"judge.output": str(output), "judge.against": against}
        config = changed(rounds.config, {**settings, "tokens.chat_template": ""})
        judge(config, str(samples), progress=progress, sampler=rounds.sampler)
        return read_table(TableFolder(output, "judged"))[1]

    compares = rounds.config.judge.by == "pairwise"
    ours = sampled(number) if compares else judged(number, "eval-judged")
    found = answering(ours)
    found["length_growth"] = found["tokens"] / max(answering(sampled(0))["tokens"], 1.0)
    others = {"first": 0, "previous": number - 1} if number else {}
    for name, other in others.items():
        if compares:
            against = str(rounds.folder(other) / "eval-samples")
            versus = win_rate(judged(number, f"eval-against-{name}", against))
        else:
            versus = win_rate(ours, judged(other, "eval-judged"))
        found[f"win_rate/{name}"] = versus.rate
        found[f"win_rate/{name}/low"] = versus.low  # of a 95 % bootstrap interval over prompts
        found[f"win_rate/{name}/high"] = versus.high
        found[f"ties/{name}"] = versus.ties
        found[f"comparisons/{name}"] = float(versus.n)
        found[f"unjudged/{name}"] = float(versus.unjudged)
    return {f"held_out/{name}": value for name, value in found.items()}


def answering(samples: pl.DataFrame) -> dict[str, float]:
    """Means over samples, judged or not."""
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
    """The share of 4-grams of words that occur before in the same text; 0 where there is none."""
    total = repeated = 0
    for text in texts:
        words = text.split()
        starts = range(len(words) - WORDS + 1)
        found = Counter(tuple(words[start : start + WORDS]) for start in starts)
        total += found.total()
        repeated += found.total() - len(found)
    return repeated / total if total else 0.0


def stop_reason(number: int, metrics: Mapping[str, float], options: RoundsOptions) -> str:
    """Why no round follows one with these metrics; empty where one may, or nothing is held out."""
    after = f"stopped after round {number}:"
    rate = metrics.get("held_out/win_rate/previous", 1.0)
    if rate < options.min_win_rate:
        bound = f"rounds.min_win_rate {options.min_win_rate:g}"
        return f"{after} its win rate against the policy before is {rate:.3f}, below {bound}"
    growth = metrics.get("held_out/length_growth", 0.0)
    if 0 < options.max_length_growth * (1 + 1e-9) < growth:
        bound = f"rounds.max_length_growth {options.max_length_growth:g}"
        return f"{after} its samples are {growth:.2f} times as long as at first, above {bound}"
    return ""
