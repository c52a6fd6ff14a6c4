"""Compares runs by the held-out rows on which all of them were evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import UsageError, counted
from ...stages.methods.table import objective_of
from ...stages.report.eval_table import REWARD, by_set, read_samples
from ...stages.report.text_tables import grid
from ...stages.report.two_runs import ALPHA, TwoRuns, compare, correct_rows, measure_of
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ..options.settings import read_yaml
from .run_report import method_options, training_folder

if TYPE_CHECKING:
    import polars as pl

MOST_SHOWN = 5
UNITS = {"log_ratio": "margin of log-ratios, nats", "logp": "margin of log-probs, nats"}


@dataclass(frozen=True)
class RunDiff:
    """Two runs, and their difference on the common rows of each held-out set."""

    runs: tuple[str, str]
    measure: str  # the value that decides whether a row is correct
    sets: Mapping[str, TwoRuns]  # one alone may have no name

    def text(self) -> str:
        """The difference of the runs, and the rows that flip."""
        lines = [
            *(f"{name}: {run}" for name, run in zip("AB", self.runs, strict=True)),
            f"correct: {self.measure} is higher for the chosen completion; for a row with one "
            "label, above 0 if it is desirable and below 0 if not",
        ]
        for of_set, found in self.sets.items():
            title = counted(found.accuracy.rows, "held-out rows")
            head = (f"{of_set}: {title}".removeprefix(": "), "A", "B", "B - A", "95 % interval")
            rows = [
                [
                    UNITS.get(one.name, one.name),
                    f"{one.first:.4f}",
                    f"{one.second:.4f}",
                    f"{one.second - one.first:+.4f}",
                    f"{one.low:+.4f} to {one.high:+.4f}",
                ]
                for one in (found.accuracy, found.margin)
                if one
            ]
            lines += ["", *grid(head, rows)]
            if found.left_out:
                lines.append(f"  {counted(found.left_out, 'rows')} in only one run are left out.")
            lines += [
                "",
                f"Correct in both {found.correct_in_both:,}, only in A {len(found.lost):,}, only "
                f"in B {len(found.gained):,}. Prompts with more correct rows in A: "
                f"{found.prompts_lost:,}, in B: {found.prompts_gained:,}; p = "
                f"{found.p_value:.3g} (McNemar's exact test).",
            ]
            if found.p_value < ALPHA:
                better = "B" if found.prompts_gained > found.prompts_lost else "A"
                lines.append(f"{better} is significantly better (p < {ALPHA:g}).")
            else:
                lines.append("On these rows the two runs are not significantly different.")
            for name, ids in (("A", found.lost), ("B", found.gained)):
                if ids:
                    more = ", …" if len(ids) > MOST_SHOWN else ""
                    lines.append(f"correct only in {name}: {', '.join(ids[:MOST_SHOWN])}{more}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Evaluated:
    """A run's held-out completions after a step."""

    title: str
    sets: Mapping[str, pl.DataFrame]  # of each held-out set, the first set first
    formula: str  # of the reward
    rewards: str  # the formula and the method's options


def diff_runs(first: Path, second: Path, step: int | None = None) -> RunDiff:
    """Compares two runs by their last evaluation, or by the one at a step."""
    runs = [_evaluated(training_folder(root), step) for root in (first, second)]
    column, measure = _measure(runs)
    first_sets, second_sets = (run.sets for run in runs)
    shared = [name for name in first_sets if name in second_sets]
    if not shared:
        both = f"{runs[0].title} and {runs[1].title}"
        raise UsageError(f"{both} have no held-out set of one name. Name them in train.eval_cache.")
    found = {name: compare(first_sets[name], second_sets[name], column) for name in shared}
    return RunDiff((runs[0].title, runs[1].title), measure, found)


def ranking(folders: Mapping[str, RunFolder]) -> tuple[str, Sequence[str]]:
    """The run with the most correct held-out rows, and sentences that compare the others to it.

    It counts the rows of the first held-out set. The same rows choose the best and test it, so the
    significance level of 5 % is divided by the number of pairs of runs. With fewer than two runs
    there is no ranking.
    """
    runs = {name: _evaluated(one, None) for name, one in folders.items() if one.evaluations()}
    if len(runs) < 2:
        return "", ()
    column, measure = _measure([*runs.values()])
    samples = {name: next(iter(run.sets.values())) for name, run in runs.items()}
    correct = {name: correct_rows(table, column) for name, table in samples.items()}
    best = max(correct, key=lambda name: correct[name].mean())
    equal = [name for name in runs if correct[name].mean() == correct[best].mean()]
    alpha = ALPHA / math.comb(len(runs), 2)
    alike, behind = list[str](), list[str]()
    for name in runs.keys() - {*equal}:
        found = compare(samples[best], samples[name], column)
        is_behind = found.p_value < alpha and found.prompts_lost > found.prompts_gained
        (behind if is_behind else alike).append(name)
    rows = counted(len(correct[best]), "held-out rows")
    accuracy = f"{correct[best].mean():.4f}"
    have = f"{best} has" if len(equal) == 1 else f"{', '.join(equal)} tie for"
    lines = [f"{have} the highest accuracy: {accuracy} of {rows}, by {measure}."]
    if alike:
        lines.append(f"{best} is not significantly better than {', '.join(sorted(alike))}.")
    if behind:
        lines.append(f"{best} is significantly better than {', '.join(sorted(behind))}.")
    return best, (*lines, "`align diff` compares two runs row by row.")


def _evaluated(folder: RunFolder, step: int | None) -> _Evaluated:
    tables, settings, ending = folder.evaluations(), read_yaml(folder.config), read_ending(folder)
    if not tables:
        raise UsageError(
            f"{folder.root} has no table of held-out rows. Train with --eval-fraction or "
            "train.eval_cache, and with train.eval_table above 0."
        )
    if step is None:
        of_model = ending.model_step if ending else None
        step = of_model if of_model in tables else max(tables)
    if step not in tables:
        steps = ", ".join(map(str, tables))
        raise UsageError(f"{folder.root} has no evaluation after step {step}. Use one of: {steps}.")
    method = settings["train.method"]
    objective = objective_of(method, method_options(settings))
    return _Evaluated(
        title=f"{folder.root}, {method}, after step {step:,}",
        sets=by_set(read_samples(tables[step])),
        formula=objective.reward_formula,
        rewards=repr((objective.reward_formula, sorted(objective.values.items(), key=str))),
    )


def _measure(runs: Sequence[_Evaluated]) -> tuple[str, str]:
    """The column to compare and its description; the reward if all runs have the same one."""
    tables = [table for run in runs for table in run.sets.values()]
    column = measure_of(tables, {run.rewards for run in runs})
    return column, f"the reward {runs[0].formula}" if column == REWARD else f"the {column}"
