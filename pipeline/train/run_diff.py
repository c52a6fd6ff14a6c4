"""Runs side by side, by the held-out rows that all of them were measured on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.errors import CorruptionError, StorageError, UsageError, counted
from ...stages.methods.table import recipe_of
from ...stages.report.cache_tables import grid
from ...stages.report.eval_table import REWARD, read_samples
from ...stages.report.two_runs import SURE, Difference, TwoRuns, compare, measure_of, right_rows
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ...stages.storage.shards import read_columns
from ..jobs.object_inputs import cache_at
from ..options.settings import read_yaml
from .run_report import method_options, training_folder

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger("align")

MOST_SHOWN = 5
UNITS = {"log_ratio": "margin of log-ratios, nats", "logp": "margin of log-probs, nats"}
HEAD = ("A", "B", "B - A", "95 % interval")


@dataclass(frozen=True)
class RunDiff:
    """Two runs, and what they make of the rows that both have."""

    runs: tuple[str, ...]  # what each is
    measure: str  # what has to be higher for a row to be right
    found: TwoRuns

    def text(self) -> str:
        """How far apart they are, and where."""
        found = self.found
        overall = [_cells(one) for one in (found.accuracy, found.gap) if one]
        lines = [
            *(f"{name}: {run}" for name, run in zip("AB", self.runs, strict=True)),
            f"right: {self.measure} of the chosen side is higher, or of one label beyond 0",
            "",
            *grid((counted(found.accuracy.rows, "held-out rows"), *HEAD), overall),
        ]
        if found.left_out:
            lines.append(
                f"  {counted(found.left_out, 'rows')} that only one of them can tell are left out."
            )
        lines += [
            "",
            f"Right in both {found.in_both:,}, in A alone {len(found.lost):,}, in B alone "
            f"{len(found.gained):,}. Chance alone divides the prompts of flipped rows as unevenly "
            f"with a probability of {found.chance:.3g} (McNemar, exact).",
        ]
        if found.are_told_apart:
            better = "B" if len(found.gained) > len(found.lost) else "A"
            lines.append(
                f"{better} is right on more of them, by more than chance (below {SURE:g})."
            )
        else:
            lines.append("These rows do not tell the two apart.")
        for name, ids in (("A", found.lost), ("B", found.gained)):
            if ids:
                more = ", …" if len(ids) > MOST_SHOWN else ""
                lines.append(f"right in {name} alone: {', '.join(ids[:MOST_SHOWN])}{more}")
        return "\n".join(lines)


def _cells(one: Difference) -> tuple[str, ...]:
    gained = one.second - one.first
    figures = (f"{one.first:.4f}", f"{one.second:.4f}", f"{gained:+.4f}")
    return UNITS.get(one.name, one.name), *figures, f"{one.low:+.4f} to {one.high:+.4f}"


def diff_runs(first: Path, second: Path, step: int | None = None) -> RunDiff:
    """Compares two runs after their last evaluation, or after that of a step."""
    runs = [_measured(training_folder(root), step) for root in (first, second)]
    measure = _measure(runs)
    prompts = known_prompts(runs[0].settings, runs[0].samples["row_id"])
    found = compare(runs[0].samples, runs[1].samples, measure, prompts)
    return RunDiff(tuple(run.said for run in runs), runs[0].told(measure), found)


@dataclass(frozen=True)
class AheadOfAll:
    """Which of several runs is ahead, if they can be compared."""

    best: str = ""
    said: tuple[str, ...] = ()


def standing(folders: Mapping[str, RunFolder]) -> AheadOfAll:
    """Which run has the most held-out rows right, and which are told apart from it.

    The best is chosen by the same rows, so each of all pairs of runs has its share of the 5 % in
    which chance may look like more.
    """
    runs = {name: _measured(one, None) for name, one in folders.items() if one.evaluations()}
    if len(runs) < 2:
        return AheadOfAll()
    measure = _measure([*runs.values()])
    right = {name: right_rows(run.samples, measure).mean() for name, run in runs.items()}
    best = max(right, key=lambda name: right[name])
    top = runs[best].samples
    prompts = known_prompts(runs[best].settings, top["row_id"])
    found = {
        name: compare(top, run.samples, measure, prompts)
        for name, run in runs.items()
        if name != best
    }
    sure = SURE / math.comb(len(runs), 2)
    apart = [
        name for name, one in found.items() if one.chance < sure and len(one.lost) > len(one.gained)
    ]
    alike = [name for name in found if name not in apart]
    rows = counted(len(right_rows(top, measure)), "held-out rows")
    lines = [
        f"{best} has the most of {rows} right: {right[best]:.4f}, by {runs[best].told(measure)}."
    ]
    if alike:
        lines.append(f"These rows do not tell it apart from {', '.join(alike)}.")
    if apart:
        lines.append(f"By more than chance it is ahead of {', '.join(apart)}.")
    return AheadOfAll(best, (*lines, "`align diff` shows two of them row by row."))


@dataclass(frozen=True)
class _Measured:
    """The single completions of a run after a step."""

    said: str
    samples: pl.DataFrame
    settings: dict[str, Any]
    rewards: str  # the formula of the rewards that its loss compares
    options: dict[str, Any]  # of the method, those in force: the rewards depend on them too

    def told(self, measure: str) -> str:
        """What a column of its table holds."""
        return f"the reward {self.rewards}" if measure == REWARD else f"the {measure}"


def _measure(runs: Sequence[_Measured]) -> str:
    """The column to compare: rewards, where the losses of all runs compare the same ones."""
    rewards = {repr((run.rewards, sorted(run.options.items(), key=str))) for run in runs}
    return measure_of([run.samples for run in runs], rewards)


def _measured(folder: RunFolder, step: int | None) -> _Measured:
    ending = read_ending(folder)
    tables, settings = folder.evaluations(), read_yaml(folder.config)
    if not tables:
        raise UsageError(
            f"{folder.root} has no single completions of held-out rows. Train with "
            "--eval-fraction, or train.eval_cache, and with train.eval_table above 0."
        )
    of_model = ending.model_step if ending and ending.model_step in tables else max(tables)
    chosen = of_model if step is None else step
    if chosen not in tables:
        steps = ", ".join(map(str, tables))
        raise UsageError(f"{folder.root} was not measured after step {chosen}, but after: {steps}.")
    recipe = recipe_of(settings["train.method"], method_options(settings))
    said = f"{folder.root}, {settings['train.method']}, after step {chosen:,}"
    samples = read_samples(tables[chosen])
    return _Measured(said, samples, settings, recipe.reward_formula, recipe.values)


def known_prompts(settings: Mapping[str, Any], ids: Iterable[str]) -> dict[str, str]:
    """The prompts of rows by their keys, as far as the run's cache is still there."""
    given = settings["train.eval_cache"] or settings["train.cache"] or settings["cache.output"]
    wanted, known = pa.array([*{*ids}]), dict[str, str]()
    try:
        folder = cache_at(given)
        manifest = folder.manifest()
        for shard in manifest.shards:
            table, _ = read_columns(folder.shard(shard), ["row_id", "prompt_key"])
            for row in table.filter(pc.is_in(table["row_id"], value_set=wanted)).to_pylist():
                known[row["row_id"]] = str(row["prompt_key"])
            if len(known) == len(wanted):
                break
    except (UsageError, CorruptionError, StorageError) as error:
        logger.info("Rows are not grouped by prompt: %s", error)
    return known
