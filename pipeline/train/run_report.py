"""`report.html`: a run on one page, made from its folder and its cache's manifest."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ...schemas.cache import Manifest
from ...schemas.errors import CorruptionError, UsageError, counted, log_failure
from ...stages.methods.table import recipe_of
from ...stages.model.loading.folder_json import read_json
from ...stages.report.cache_tables import grid
from ...stages.report.charts import further_curves, learning_curves, plain
from ...stages.report.eval_table import REWARD, TEXTS, kind_of, read_samples, spread_charts
from ...stages.report.html_page import render_page
from ...stages.report.signs import Evidence, Sign, Signs, look_for_signs
from ...stages.storage.bucket.objects import location
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.disk import fs
from ...stages.storage.run.checkpoints import read_checkpoint
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ...stages.tracking.journal import EVAL, RESERVED, entry_batches
from ..options.settings import run_settings, without_secrets

if TYPE_CHECKING:
    import polars as pl

    from ...schemas.checkpoint import Ending as EndingRecord
    from ...stages.train.synchronized import Ending

Curves: TypeAlias = Mapping[str, list[tuple[float, float]]]  # (step, value) by name, steps rising

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
    history = read_history(folder.metrics)
    learned, held_out = curves(history.learned), curves(history.held_out)
    return render_page(
        "run.html.j2",
        title=folder.root.resolve().name,
        sentences=list(_sentences(folder, history, settings["train.method"])),
        headlines=dict(_headlines(history.measured)),
        signs=_signs(folder, learned, held_out, settings),
        learning=learning_curves(learned, held_out),
        completions=_spreads(folder),
        cache=_of_cache(folder, settings),
        settings=_shown(settings),
        further=further_curves(learned, held_out),
    )


def _signs(
    folder: RunFolder, learned: Curves, held_out: Curves, settings: Mapping[str, Any]
) -> Signs:
    tables = {
        step: read_samples(path).drop(TEXTS, strict=False)
        for step, path in folder.evaluations().items()
    }
    spikes = frozenset(_steps_in(folder.spikes))
    return look_for_signs(Evidence(learned, held_out, tables, _beta(settings), spikes))


def _beta(settings: Mapping[str, Any]) -> float | None:
    """The beta of the method with a KL of mismatched completions, if there is one."""
    given = {
        name.removeprefix("method."): value
        for name, value in settings.items()
        if name.startswith("method.")
    }
    parts = recipe_of(settings["train.method"], given).parts
    options = [part.options for part in parts if "mismatched" in part.method.needs]
    return next((one.beta for one in options if hasattr(one, "beta")), None)


def _sentences(folder: RunFolder, history: History, method: str) -> Iterator[str]:
    ending = read_ending(folder)
    is_finished = ending is not None and ending.ending == "finished"
    how = "finished" if is_finished else "not finished"
    yield f"{method}, {counted(history.steps, 'steps')}, {how}."
    yield from ended_how(ending)
    for change in ending.changes if ending else ():
        yield f"Resumed with a change: {change}."
    if steps := _not_applied(folder, history.learned):
        shown = ", ".join(f"{step:,}" for step in steps[:10])
        more = f" and {len(steps) - 10:,} more" if len(steps) > 10 else ""
        yield f"NaN or infinity: steps {shown}{more} were not applied (nonfinite.jsonl)."


def _not_applied(folder: RunFolder, learned: pl.DataFrame) -> list[int]:
    """Steps that were not applied; one that was run again after a resume may have been."""
    failed = _steps_in(folder.nonfinite)
    well = {step for step, value in curves(learned).get("step_applied", ()) if value == 1}
    return sorted(failed - well)


def _steps_in(file: Path) -> set[int]:
    """The steps that a file with the rows of some of them names."""
    return {int(step) for step in STEP.findall(fs.read_bytes(file))} if file.exists() else set()


def _headlines(measured: Measured) -> Iterator[tuple[str, str]]:
    prefix = EVAL if measured.rows == "held out" else ""
    for name, said in HEADLINES.items():
        before, after = (one.get(f"{prefix}{name}") for one in (measured.before, measured.after))
        if before is not None:
            came_to = "" if after is None else f" → {plain(after)}"
            yield f"{said}, {MEASURED_ON[measured.rows]}", f"{plain(before)}{came_to}"


@dataclass(frozen=True)
class _Spreads:
    """Charts of single completions, with a note on their rows."""

    charts: str = ""
    note: str = ""


def _spreads(folder: RunFolder) -> _Spreads:
    paths = folder.evaluations()
    if not paths:
        return _Spreads()
    tables = {step: read_samples(paths[step]) for step in {min(paths), max(paths)}}
    shown = tables[max(tables)]
    note = (
        f"{counted(len(shown), 'completions')} of the first rows held out, in the order of the "
        f"cache, which is shuffled; after step {max(tables):,}."
    )
    if kind_of(shown.columns) == "log-ratios":
        note += " A log-ratio is log(policy / reference), summed over a completion."
    if REWARD in shown.columns:
        note += " A reward is what the method's loss compares."
    return _Spreads(spread_charts(tables), note)


@dataclass(frozen=True)
class _CacheFacts:
    """Facts of the run's cache, by name."""

    data: dict[str, str]
    lineage: dict[str, str] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)


def _of_cache(folder: RunFolder, settings: dict[str, Any]) -> _CacheFacts:
    """The origin of the reference's log-probs, as far as the cache still has it."""
    cache = CacheFolder(location(settings["train.cache"] or settings["cache.output"]))
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


MeasuredOn = Literal["held out", "training", ""]


@dataclass(frozen=True)
class Measured:
    """Two moments of a run, their metrics named as in its journal."""

    rows: MeasuredOn = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # empty unless of a later step


@dataclass(frozen=True)
class History:
    """A run's journal: step, time and a column per metric, null where a line lacks it."""

    learned: pl.DataFrame
    held_out: pl.DataFrame  # the names of its metrics begin with eval/

    @property
    def steps(self) -> int:
        """The last step with a line."""
        return int(max([0, *self.learned["step"], *self.held_out["step"]]))

    @property
    def measured(self) -> Measured:
        """First and last: on held-out rows, or on training steps where nothing is held out."""
        if f"{EVAL}loss" in self.held_out.columns:
            return Measured("held out", *_ends(self.held_out.drop_nulls(f"{EVAL}loss")))
        if "loss" in self.learned.columns:
            return Measured("training", *_ends(self.learned.drop_nulls("loss")))
        return Measured("training")


def read_history(metrics: Path) -> History:
    """Reads the journal of a run, some lines at a time."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that a rank without a report can do without

    kinds = pl.Schema({"step": pl.Int64(), "time": pl.Datetime("ms", "UTC")})
    frames = [pl.DataFrame(schema=kinds)]
    for entries in entry_batches(metrics):
        rows = [
            {
                "step": entry.step,
                "time": entry.points[0].time_ms,
                **{point.key: point.value for point in entry.points},
            }
            for entry in entries
        ]
        frames.append(pl.from_dicts(rows, schema_overrides=kinds, infer_schema_length=None))
    lines = pl.concat(frames, how="diagonal")

    def of(names: Sequence[str]) -> pl.DataFrame:
        holds_one = pl.any_horizontal(
            pl.lit(False), *(pl.col(name).is_not_null() for name in names)
        )
        return lines.filter(holds_one).select(*kinds, *names)

    held_out = [name for name in lines.columns if name.startswith(EVAL)]
    learned = [name for name in lines.columns if name not in {*kinds, *held_out}]
    return History(of(learned), of(held_out))


def curves(lines: pl.DataFrame) -> Curves:
    """Every metric's points, by its name without eval/."""
    return {
        name.removeprefix(EVAL): lines.select("step", name).drop_nulls().rows()
        for name in lines.columns
        if name not in RESERVED
    }


def _ends(lines: pl.DataFrame) -> tuple[dict[str, float], dict[str, float]]:
    first, last = lines.row(0, named=True), lines.row(-1, named=True)
    return _metrics(first), _metrics(last) if last["step"] > first["step"] else {}


def _metrics(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in line.items() if name not in RESERVED and value is not None
    }


# Worth a line of its own, where a method reports it.
SUMMARIZED = (
    "loss",
    "rewards/accuracies",
    "rewards/ties",
    "rewards/margins",
    "log_odds/accuracy",
    "log_odds/ratio",
)


def ended_how(ending: EndingRecord | None) -> Iterator[str]:
    """Sentences on an end before the last step, and on a model that is not the last step's."""
    if ending and ending.reason:
        yield f"It ended before its {counted(ending.total_steps, 'steps')}: {ending.reason}."
    if ending and ending.model_step is not None:
        yield f"Its model is that of step {ending.model_step:,}, the best (train.write_best)."


@dataclass(frozen=True)
class Trained:
    """An ended run, with its first and last metrics."""

    folder: RunFolder
    ending: Ending
    steps: int
    measured: Measured
    is_old: bool = False  # it had ended before it was asked for
    ended: tuple[str, ...] = ()  # sentences on its end
    signs: tuple[Sign, ...] = ()

    def text(self) -> str:
        """A few lines for a person."""
        already = " already: this run is finished, nothing was trained" if self.is_old else ""
        lines = [f"{self.folder.root}: {counted(self.steps, 'steps')} done{already}"]
        lines += self.ended
        if self.ending == "finished":
            lines.append(f"model in {self.folder.model}")
        else:
            lines.append("stopped by train.max_time; the same command with --resume auto continues")
        told = [f"{one.name}: {one.said} {one.hint}" for one in self.signs]
        return "\n".join([*lines, *before_and_after(self.measured), *told, *self._looks()])

    def _looks(self) -> Iterator[str]:
        """Where the run can be looked at, and the command that asks the trained model."""
        if self.folder.report.exists():
            yield f"report in {self.folder.report}"
        whole = self.folder.merged if self.folder.merged.exists() else self.folder.model
        config = whole / "config.json"
        if self.ending != "finished" or not config.exists():  # an adapter alone
            return
        if "Classification" in str(read_json(config).get("architectures")):  # a reward model
            yield f"next: align score data.parquet --reward-model {whole}"
        else:
            yield f"next: align sample prompts.jsonl --model {whole}"


def outcome(folder: RunFolder, ending: Ending) -> Trained:
    """Reads the number of steps of a run, and its metrics."""
    known = read_ending(folder)
    ended = tuple(ended_how(known))
    if not folder.metrics.exists():
        logger.warning("%s is missing: what was measured is lost.", folder.metrics)
        return Trained(folder, ending, known.step if known else 0, Measured(), ended=ended)
    history = read_history(folder.metrics)
    found: tuple[Sign, ...] = ()
    with log_failure("Nothing is said of what stands out"):
        learned, held_out = curves(history.learned), curves(history.held_out)
        found = _signs(folder, learned, held_out, run_settings(folder)).found
    return Trained(folder, ending, history.steps, history.measured, signs=found, ended=ended)


def before_and_after(measured: Measured) -> list[str]:
    """A small table of the held-out rows, empty where nothing was measured twice."""
    before, after = measured.before, measured.after
    names = [name for name in SUMMARIZED if f"{EVAL}{name}" in before and f"{EVAL}{name}" in after]
    if not names:
        return []
    rows = [[name, *(f"{one[EVAL + name]:z.4f}" for one in (before, after))] for name in names]
    return grid(("held-out rows", "before", "after"), rows)
