"""`report.html`: a run on one page, made of what lies in its folder and of its cache's manifest."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..schemas.cache import Manifest
from ..schemas.errors import CorruptionError, UsageError, counted
from ..stages.report.cache_tables import grid
from ..stages.report.charts import DRAWN_NOWHERE, further_curves, learning_curves, plain
from ..stages.report.eval_table import read_evaluation, spread_charts
from ..stages.report.html_page import render_page
from ..stages.storage import fs
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.checkpoints import read_checkpoint
from ..stages.storage.manifest_file import load_manifest
from ..stages.storage.run_folder import RunFolder, read_ending
from ..stages.tracking.journal import EVAL, Entry, all_entries
from .settings import run_settings, without_secrets

if TYPE_CHECKING:
    from ..stages.train.loop import Ending
Curves = Mapping[str, list[tuple[float, float]]]  # (step, value) by name, steps rising

logger = logging.getLogger("align")

HEADLINES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
}
MEASURED_ON = {"held out": "held-out rows", "training": "first and last step"}
STEP = re.compile(rb'^{"step": ([0-9]+), .*}$', re.MULTILINE)  # a whole line


def write_report(root: Path) -> Path:
    """Writes the page of a run, finished or not, and returns its path."""
    folder = training_folder(root)
    fs.drop_drafts(folder.report)
    fs.publish(folder.report, _page(folder).encode(), label="report")
    return folder.report


def training_folder(root: Path) -> RunFolder:
    """The folder of a training run that has begun; any other is refused."""
    folder = RunFolder(root)
    if not (folder.metrics.exists() and folder.config.exists()):
        raise UsageError(
            f"{root} holds no training run: it lacks {folder.metrics.name} or "
            f"{folder.config.name}. Name the --output of `align train`."
        )
    return folder


def _page(folder: RunFolder) -> str:
    settings = run_settings(folder)
    history = history_of(folder.metrics, is_drawn=lambda name: name not in DRAWN_NOWHERE)
    return render_page(
        "run.html.j2",
        title=folder.root.resolve().name,
        sentences=list(_sentences(folder, history, settings["train.method"])),
        headlines=dict(_headlines(history.measured)),
        learning=learning_curves(history.learned, history.held_out),
        held_out=_spreads(folder),
        cache=_of_cache(folder, settings),
        settings=_shown(settings),
        further=further_curves(history.learned, history.held_out),
    )


def _sentences(folder: RunFolder, history: History, method: str) -> Iterator[str]:
    ending = read_ending(folder)
    is_finished = ending is not None and ending.ending == "finished"
    how = "finished" if is_finished else "not finished"
    yield f"{method}, {counted(history.steps, 'steps')}, {how}."
    for change in ending.changes if ending else ():
        yield f"Resumed with a change: {change}."
    if steps := _not_applied(folder, history):
        shown = ", ".join(f"{step:,}" for step in steps[:10])
        more = f" and {len(steps) - 10:,} more" if len(steps) > 10 else ""
        yield f"NaN or infinity: steps {shown}{more} were not applied (nonfinite.jsonl)."


def _not_applied(folder: RunFolder, history: History) -> list[int]:
    """Steps that were not applied; one that was run again after a resume may have been."""
    if not folder.nonfinite.exists():
        return []
    failed = {int(step) for step in STEP.findall(fs.read_bytes(folder.nonfinite))}
    well = {int(step) for step, value in history.learned.get("step_applied", ()) if value == 1}
    return sorted(failed - well)


def _headlines(measured: Measured) -> Iterator[tuple[str, str]]:
    prefix = EVAL if measured.rows == "held out" else ""
    for name, said in HEADLINES.items():
        before, after = (one.get(f"{prefix}{name}") for one in (measured.before, measured.after))
        if before is not None:
            came_to = "" if after is None else f" → {plain(after)}"
            yield f"{said}, {MEASURED_ON[measured.rows]}", f"{plain(before)}{came_to}"


@dataclass(frozen=True)
class _Spreads:
    """Of single completions, and what the charts are of."""

    charts: str = ""
    note: str = ""


def _spreads(folder: RunFolder) -> _Spreads:
    paths = folder.evaluations()
    if not paths:
        return _Spreads()
    tables = {step: read_evaluation(paths[step]) for step in {min(paths), max(paths)}}
    shown = tables[max(tables)]
    note = (
        f"{counted(len(shown.completions), 'completions')} of the first rows held out, as they lie "
        f"in the cache, which is shuffled; after step {max(tables):,}."
    )
    if shown.kind == "log-ratios":
        note += " A log-ratio is log(policy / reference), summed over a completion."
    if any(one.reward is not None for one in shown.completions):
        note += " A reward is what the method's loss compares."
    return _Spreads(spread_charts(tables), note)


@dataclass(frozen=True)
class _CacheFacts:
    """Names and what they stand for."""

    data: dict[str, str]
    lineage: dict[str, str] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)


def _of_cache(folder: RunFolder, settings: dict[str, Any]) -> _CacheFacts:
    """Where the reference's log-probs come from, as far as the cache still holds it."""
    cache = CacheFolder(Path(settings["train.cache"] or settings["cache.output"]))
    try:
        roots = {
            read_checkpoint(folder.step(step)).position.identity.cache_root
            for step in folder.steps()
        }
        manifest = load_manifest(cache, min(roots, default=""))
    except (UsageError, CorruptionError) as error:
        return _CacheFacts({"cache": str(error)})
    if others := roots - {manifest.root}:
        gone = f"{cache.root} holds another cache now. This run was trained on root {min(others)}."
        return _CacheFacts({"cache": gone})
    lineage = _lineage(cache, manifest, settings)
    return _CacheFacts(_data(manifest), lineage, manifest.fingerprint)


def _data(manifest: Manifest) -> dict[str, str]:
    files = {
        entry.name: f"{counted(entry.rows, 'rows')}, sha256 {entry.sha256}"
        for entry in manifest.inputs
    }
    quarantined = manifest.quarantined.items()
    dropped = {f"left out: {why}": counted(rows, "rows") for why, rows in quarantined}
    notes = {f"counted: {what}": f"{number:,}" for what, number in manifest.notes.items()}
    kept = f"{counted(manifest.rows, 'rows')} of {manifest.rows_in:,} read"
    completions = counted(manifest.branches, "completions")
    return {**files, "in the cache": f"{kept}, {completions}", **dropped, **notes}


def _lineage(cache: CacheFolder, manifest: Manifest, settings: dict[str, Any]) -> dict[str, str]:
    began = settings["train.model"] or f"{manifest.model}, the reference"
    adapter = {"its adapter": manifest.adapter} if manifest.adapter else {}
    return {
        "policy began as": began,
        "reference": manifest.model,
        **adapter,
        "cache": str(cache.root),
        "cache root": manifest.root,
        "reference weights": manifest.fingerprint["model.weights"],
    }


def _shown(settings: dict[str, Any]) -> dict[str, str]:
    sections = ("train", "method", "lora", "model")
    return {
        name: str(value)
        for name, value in without_secrets(settings).items()
        if name.partition(".")[0] in sections
    }


@dataclass(frozen=True)
class History:
    """A run's journal, read once."""

    steps: int
    measured: Measured  # first and last
    learned: Curves
    held_out: Curves  # their names without the prefix


def history_of(metrics: Path, *, is_drawn: Callable[[str], bool]) -> History:
    """Reads the journal of a run, line by line; it keeps the curves that are drawn."""
    learned: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    held_out: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    ends, steps = Ends(), 0
    for entry in all_entries(metrics):
        ends.add(entry)
        steps = max(steps, entry.step)
        for point in entry.points:
            kept = held_out if point.key.startswith(EVAL) else learned
            name = point.key.removeprefix(EVAL)
            if is_drawn(name):
                kept[name].append((float(entry.step), point.value))
    return History(steps, ends.measured(), dict(learned), dict(held_out))


MeasuredOn = Literal["held out", "training", ""]


@dataclass(frozen=True)
class Measured:
    """Two moments of a run, their metrics named as in its journal."""

    rows: MeasuredOn = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # empty unless of a later step


class Ends:
    """The first and the last line of each kind in a journal."""

    def __init__(self) -> None:
        self._held_out: list[Entry] = []
        self._learned: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Takes the next line."""
        names = {point.key for point in entry.points}
        if f"{EVAL}loss" in names:
            self._held_out = [*self._held_out[:1], entry]
        if "loss" in names:
            self._learned = [*self._learned[:1], entry]

    def measured(self) -> Measured:
        """The held-out metrics, or those of training steps where nothing is held out."""
        if self._held_out:
            return Measured("held out", *_moments(self._held_out))
        return Measured("training", *_moments(self._learned))


def _moments(ends: list[Entry]) -> tuple[dict[str, float], dict[str, float]]:
    if not ends:
        return {}, {}
    first, last = ends[0], ends[-1]
    return _values(first), _values(last) if last.step > first.step else {}


def _values(entry: Entry) -> dict[str, float]:
    return {point.key: point.value for point in entry.points}


# Worth a line of its own, where a method reports it.
SUMMARIZED = (
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "log_odds/accuracy",
    "log_odds/ratio",
)


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and what was measured first and last."""

    folder: RunFolder
    ending: Ending
    steps: int
    measured: Measured
    is_old: bool = False  # it had ended before it was asked for

    def text(self) -> str:
        """A few lines for a person."""
        already = " already: this run is finished, nothing was trained" if self.is_old else ""
        lines = [f"{self.folder.root}: {counted(self.steps, 'steps')} done{already}"]
        if self.ending == "finished":
            lines.append(f"model in {self.folder.model}")
        else:
            lines.append("stopped by train.max_time; the same command with --resume auto goes on")
        return "\n".join([*lines, *before_and_after(self.measured)])


def outcome(folder: RunFolder, ending: Ending) -> Trained:
    """Reads how many steps a run took, and its metrics."""
    if not folder.metrics.exists():
        logger.warning("%s is gone: what was measured is lost.", folder.metrics)
        known = read_ending(folder)
        return Trained(folder, ending, known.step if known else 0, Measured())
    history = history_of(folder.metrics, is_drawn=lambda _: False)
    return Trained(folder, ending, history.steps, history.measured)


def before_and_after(measured: Measured) -> list[str]:
    """A small table of the held-out rows, empty where nothing was measured twice."""
    before, after = measured.before, measured.after
    names = [name for name in SUMMARIZED if f"{EVAL}{name}" in before and f"{EVAL}{name}" in after]
    if not names:
        return []
    rows = [[name, *(f"{one[EVAL + name]:.4f}" for one in (before, after))] for name in names]
    return grid(("held-out rows", "before", "after"), rows)
