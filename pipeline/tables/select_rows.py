"""`align select`: selects preference data from judged samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import polars as pl

from ...schemas.config import Config
from ...schemas.errors import UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.rows import BadRow
from ...stages.data.cells import read_completion, read_prompt
from ...stages.select.selection import select_rows
from ...stages.storage.tables import TableFolder, TableManifest
from ..work import owned
from .table_inputs import read_input

ROWS = {
    "best_worst": "pairs",
    "all_pairs": "pairs",
    "labels": "labelled completions",
    "groups": "groups with scores",
}


@dataclass(frozen=True)
class SelectResult:
    """The table of selected rows."""

    folder: str
    manifest: TableManifest

    def text(self) -> str:
        """The summary for the terminal: rows, and what is left out."""
        counts, settings = self.manifest.counts, self.manifest.settings
        kind = settings["rows"]
        lines = [f"{self.folder}: {counted(counts['rows'], ROWS[kind])} from {_inputs_of(counts)}"]
        lines += [f"left out: {reason}" for reason in _left_out(counts, kind)]
        if settings["max_length_ratio"] and settings["length"] == "characters":
            lines.append("lengths are in characters, because the samples have no completion_tokens")
        tokens = " --token-logps" if kind == "groups" else ""  # GRPO and PPO need them
        return "\n".join([*lines, f"next: align precompute-ref {self.folder}{tokens}"])


def select(config: Config, judged: str) -> SelectResult:
    """Selects preference data from judged samples, or from scored rows of a plain file."""
    # Refuse settings that have no effect, or that no row can meet.
    options = config.select
    for name in ("min_gap", "max_length_ratio"):
        if getattr(options, name) and ROWS[options.rows] != "pairs":
            raise UsageError(
                f"select.{name} is for pairs, and select.rows is {options.rows}. Leave it out, or "
                "set select.rows to best_worst or all_pairs."
            )
    if 0 < options.max_length_ratio < 1:
        raise UsageError(
            f"select.max_length_ratio is {options.max_length_ratio:g}, and it is the longer length "
            "divided by the shorter. Set it to at least 1, or to 0 for no limit."
        )

    source = read_input(config, judged, "judged")
    unit = "tokens" if "completion_tokens" in source.table.columns else "characters"
    table, selected = select_rows(_with_measures(source.table, unit), options)
    counts = {**source.left_out, **selected}
    if not counts["rows"]:
        raise UsageError(
            f"{judged}: no row can be made from {_inputs_of(counts)}. Left out: "
            f"{', '.join(_left_out(counts, options.rows))}. Sample more (align sample -n), or "
            "relax --min-gap, --max-length-ratio or --keep-cut."
        )
    settings = {**asdict(options), "length": unit}
    del settings["output"]
    output = TableFolder.at(options.output, "selected")
    with owned(output, "select", part=None):
        manifest = output.publish(
            table,
            made_from={source.kind: source.root},
            settings=settings,
            counts=counts,
            sampling=source.sampling,
        )
    return SelectResult(str(output), manifest)


def _with_measures(table: pl.DataFrame, unit: str) -> pl.DataFrame:
    """The samples with the columns that selection compares: text (a digest), is_cut and length."""
    texts: list[str | None] = []  # None for a completion that stage 1 would refuse
    characters: list[int] = []
    for prompt, completion in table.select("prompt", "completion").iter_rows():
        try:
            text = read_completion(completion, "completion", read_prompt(prompt, "prompt"))
        except BadRow:
            texts.append(None)
            characters.append(0)
            continue
        texts.append(digest(text))
        parts = [text] if isinstance(text, str) else [one.get("content") or "" for one in text]
        characters.append(sum(map(len, parts)))
    is_cut = pl.col("finish").eq_missing("length")
    return table.with_columns(
        pl.Series("text", texts, pl.String),
        is_cut=is_cut if "finish" in table.columns else pl.lit(value=False),
        length=pl.col("completion_tokens")
        if unit == "tokens"
        else pl.Series(characters, dtype=pl.Int64),
    )


def _inputs_of(counts: Mapping[str, int]) -> str:
    return f"{counted(counts['prompts'], 'prompts')}, {counted(counts['samples'], 'samples')}"


def _left_out(counts: Mapping[str, int], kind: str) -> list[str]:
    """The counts of what is left out, in words, one per reason."""
    fewest = 2 if ROWS[kind] == "pairs" else 1
    pairs = "pairs" if kind == "all_pairs" else "prompts without a pair"
    reasons = {
        "unusable": "unusable rows",
        "no_score": "samples without a score",
        "no_text": "samples with a blank or unreadable text",
        "cut": "samples cut at max_new_tokens",
        "duplicates": "samples with the same text as another",
        "at_threshold": "samples at the threshold",
        "too_few": f"prompts with fewer than {fewest} usable samples",
        "too_near": f"{pairs} because of min_gap",
        "too_unlike": f"{pairs} because of max_length_ratio",
    }
    return [counted(counts[name], words) for name, words in reasons.items() if counts.get(name)]
