"""Selects rows of preference data: reads judged samples, chooses, writes the selected table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import polars as pl

from ...schemas.config import Config
from ...schemas.errors import UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.round_options import SelectOptions
from ...schemas.rows import BadRow, Text
from ...schemas.table_manifest import TableManifest
from ...stages.data.cells import read_completion, read_prompt
from ...stages.select.selection import select_rows
from ...stages.storage.tables import TableFolder
from ..work import owned
from .table_inputs import read_input

ROWS = {
    "best_worst": "pairs",
    "all_pairs": "pairs",
    "labels": "labelled completions",
    "groups": "groups with scores",
}
OF_SAMPLES = {
    "unusable": "rows that cannot be read",
    "no_score": "samples without a score",
    "no_text": "samples whose text is blank or cannot be read",
    "cut": "samples cut at max_new_tokens",
    "duplicates": "samples with the text of another",
    "at_threshold": "samples at the threshold",
}
OF_PAIRS = {"too_near": "no further apart than min_gap", "too_unlike": "too unlike in length"}


@dataclass(frozen=True)
class SelectResult:
    """The selected rows, where they are, and what was left out."""

    folder: str
    manifest: TableManifest

    def text(self) -> str:
        """A summary of a few lines."""
        counts, settings = self.manifest.counts, self.manifest.settings
        kind = settings["rows"]
        made_of = (
            f"{counted(counts['prompts'], 'prompts')}, {counted(counts['samples'], 'samples')}"
        )
        lines = [f"{self.folder}: {counted(counts['rows'], ROWS[kind])} of {made_of}"]
        lines += [f"left out: {reason}" for reason in left_out(counts, kind)]
        if settings["max_length_ratio"] and settings["length"] == "characters":
            lines.append("lengths are in characters: the samples have no completion_tokens")
        tokens = " --token-logps" if kind == "groups" else ""  # GRPO and PPO need them
        return "\n".join([*lines, f"next: align precompute-ref {self.folder}{tokens}"])


def select(config: Config, judged: str) -> SelectResult:
    """Makes preference data of judged samples, or of scored rows in a plain file."""
    options = config.select
    _require_sense(options)
    source = read_input(config, judged, "judged")
    selected = select_rows(_described(source.table), options)
    counts = {**source.left_out, **selected.counts}
    if not counts["rows"]:
        raise UsageError(_nothing(judged, counts, options.rows))
    settings = {**asdict(options), "length": _unit_of_length(source.table)}
    del settings["output"]
    output = TableFolder.at(options.output, "selected")
    with owned(output, "select", part=None):
        manifest = output.publish(
            selected.table,
            made_from={source.kind: source.root},
            settings=settings,
            counts=counts,
            sampling=source.sampling,
        )
    return SelectResult(str(output), manifest)


def left_out(counts: Mapping[str, int], kind: str) -> list[str]:
    """Counts of the samples left out, reason by reason, in words."""
    fewest = 2 if ROWS[kind] == "pairs" else 1
    short = f"prompts with fewer than {fewest} samples left"
    of_pairs = "pairs" if kind == "all_pairs" else "prompts whose pairs are"
    reasons = {
        **OF_SAMPLES,
        "too_few": short,
        **{name: f"{of_pairs} {reason}" for name, reason in OF_PAIRS.items()},
    }
    return [counted(counts[name], words) for name, words in reasons.items() if counts.get(name)]


def _nothing(judged: str, counts: Mapping[str, int], kind: str) -> str:
    made_of = f"{counted(counts['prompts'], 'prompts')}, {counted(counts['samples'], 'samples')}"
    return (
        f"{judged}: no row is left of {made_of}. Left out: {', '.join(left_out(counts, kind))}. "
        "Sample more (align sample -n), judge otherwise, or allow what was left out: --min-gap, "
        "--max-length-ratio, --keep-cut."
    )


def _require_sense(options: SelectOptions) -> None:
    """Refuses settings that would be ignored, or that no row can meet."""
    is_pairs = ROWS[options.rows] == "pairs"
    given = {"min_gap": options.min_gap, "max_length_ratio": options.max_length_ratio}
    for name, value in given.items():
        if value and not is_pairs:
            raise UsageError(
                f"select.{name} is of pairs, and select.rows is {options.rows}. Leave it out, or "
                "set select.rows to best_worst or all_pairs."
            )
    if 0 < options.max_length_ratio < 1:
        raise UsageError(
            f"select.max_length_ratio is {options.max_length_ratio:g}; expected at least 1, or 0 "
            "for any: it is the longer length over the shorter."
        )


def _described(table: pl.DataFrame) -> pl.DataFrame:
    """The samples with what they are compared by: digests of their texts, not the texts."""
    keys: list[str | None] = []
    lengths: list[int] = []
    for text in _texts(table):
        keys.append(None if text is None else digest(text))
        lengths.append(_characters(text))
    is_cut = pl.col("finish").eq_missing("length")
    in_tokens = _unit_of_length(table) == "tokens"
    return table.with_columns(
        text=pl.Series(keys, dtype=pl.String),
        is_cut=is_cut if "finish" in table.columns else pl.lit(value=False),
        length=pl.col("completion_tokens") if in_tokens else pl.Series(lengths, dtype=pl.Int64),
    )


def _unit_of_length(table: pl.DataFrame) -> str:
    return "tokens" if "completion_tokens" in table.columns else "characters"


def _texts(table: pl.DataFrame) -> Iterator[Text | None]:
    """Each completion as stage 1 reads it; None for what it would refuse."""
    for prompt, completion in table.select("prompt", "completion").iter_rows():
        try:
            yield read_completion(completion, "completion", read_prompt(prompt, "prompt"))
        except BadRow:
            yield None


def _characters(text: Text | None) -> int:
    if text is None or isinstance(text, str):
        return len(text or "")
    return sum(len(message.get("content") or "") for message in text)
