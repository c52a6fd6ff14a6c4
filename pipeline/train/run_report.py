"""`report.html`: a run on one page, made of its folder and its cache's manifest."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.cache import Manifest
from ...schemas.errors import CorruptionError, StorageError, UsageError, counted, log_failure
from ...schemas.safe_text import beginning
from ...stages.model.loading.model_folder import read_json
from ...stages.report.axes import plain
from ...stages.report.cache_tables import grid
from ...stages.report.charts import Best
from ...stages.report.eval_table import REWARD, TEXTS, kind_of, read_samples, spread_charts
from ...stages.report.html_page import render_page
from ...stages.report.run_curves import BEST, further_curves, learning_curves
from ...stages.report.side_by_side import Answered, read_answers
from ...stages.report.signs import Evidence, Sign, look_for_signs
from ...stages.report.visited_rows import join_parts, learned_rows, read_visits
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.copies import manifest_folder
from ...stages.storage.disk import fs
from ...stages.storage.run.checkpoints import read_checkpoint, wanted
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ...stages.tracking.journal import EVAL
from ...stages.tracking.run_texts import data_name, model_name
from ..options.settings import read_yaml, without_secrets
from .run_head import ended_how, head_facts, sentences, trouble
from .run_history import Curves, Measured, curves, read_history

if TYPE_CHECKING:
    from ...schemas.checkpoint import Ending as RunEnding
    from ...stages.train.synchronized import Ending

logger = logging.getLogger("align")

HEADLINES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
}
MEASURED_ON = {"held out": "held-out rows", "training": "first and last step"}


def write_report(root: Path) -> tuple[Sign, ...]:
    """Writes the page of a run, finished or not; returns what stands out in it."""
    folder = training_folder(root)
    with log_failure("No table of training rows"):
        if parts := folder.rows_written():
            join_parts([*parts], folder.rows)
    settings, history = read_yaml(folder.config), read_history(folder.metrics)
    ending = read_ending(folder)
    measured = history.measured(ending.model_step if ending else None)
    learned, held_out = curves(history.learned), curves(history.held_out)
    cache, signs = _of_cache(folder, settings), _signs(folder, learned, held_out)
    page = render_page(
        "run.html.j2",
        title=folder.root.resolve().name,
        sentences=list(sentences(folder, ending, history, settings["train.method"])),
        trouble=trouble(folder, ending, history),
        signs=signs,
        answers=_answers(folder),
        facts=head_facts(settings, history, model=model_name(cache.policy), data=cache.name),
        headlines=dict(_headlines(measured)),
        learning=learning_curves(learned, held_out, _best(settings)),
        completions=_spreads(folder),
        rows=_rows(folder),
        cache=cache,
        settings=_shown(settings),
        further=further_curves(learned, held_out, _best(settings)),
    )
    fs.drop_drafts(folder.report)
    fs.publish(folder.report, page.encode())
    return signs


MOST_NAMED = 20  # rows of a kind


def _rows(folder: RunFolder) -> dict[str, str]:
    """What became of the training rows, if that was written down."""
    if not folder.rows.exists():
        return {}
    found = learned_rows(read_visits(folder.rows))

    def named(ids: tuple[str, ...]) -> str:
        more = f" and {len(ids) - MOST_NAMED:,} more" if len(ids) > MOST_NAMED else ""
        first = f": {', '.join(ids[:MOST_NAMED])}{more}" if ids else ""
        return f"{len(ids):,} ({len(ids) / found.rows:.1%}){first}"

    again = {"above 0, and below it later": named(found.forgotten)} if found.visits > 1 else {}
    return {
        "training rows": f"{found.rows:,}, each visited {found.visits:,} times at most",
        "margin above 0 at the last visit": f"{found.right:,} ({found.right / found.rows:.1%})",
        "above 0 at no visit": named(found.never),
        **again,
    }


MOST_SHOWN = 4000  # characters of an answer


def _answers(folder: RunFolder) -> list[Answered]:
    if not folder.answers.exists():
        return []
    return [
        replace(
            one,
            prompt=beginning(one.prompt, MOST_SHOWN),
            before=beginning(one.before, MOST_SHOWN),
            after=beginning(one.after, MOST_SHOWN),
        )
        for one in read_answers(folder.answers)
    ]


def training_folder(root: Path) -> RunFolder:
    """The folder of a training run that has begun; any other is refused."""
    folder = RunFolder(root)
    if not (folder.metrics.exists() and folder.config.exists()):
        raise UsageError(
            f"{root} holds no training run: it lacks {folder.metrics.name} or "
            f"{folder.config.name}. Name the --output of `align train`."
        )
    return folder


def require_finished(folder: RunFolder) -> RunEnding:
    """How a finished run ended; a run that is not has no model of its last step."""
    ending = read_ending(folder)
    if ending is None or ending.ending != "finished" or not folder.model.exists():
        raise UsageError(
            f"{folder.root} has no trained model yet: it is not finished. --resume auto goes on."
        )
    return ending


def _best(settings: Mapping[str, Any]) -> dict[str, Best]:
    """The held-out metrics whose best value is marked: the loss, and that of train.best."""
    asked = wanted(settings["train.best"])
    if not asked.metric.startswith(EVAL):
        return dict(BEST)
    return {**BEST, asked.metric.removeprefix(EVAL): "lowest" if asked.is_lowest else "highest"}


def _signs(folder: RunFolder, learned: Curves, held_out: Curves) -> tuple[Sign, ...]:
    tables = {
        step: read_samples(path).drop(TEXTS, strict=False)
        for step, path in folder.evaluations().items()
    }
    return look_for_signs(Evidence(learned, held_out, tables))


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
    policy: str  # the path that the policy began as, empty if it is not known
    name: str = ""  # of the data
    lineage: dict[str, str] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)


def _of_cache(folder: RunFolder, settings: dict[str, Any]) -> _CacheFacts:
    """The origin of the reference's log-probs, as far as the cache still has it."""
    given = settings["train.cache"] or settings["cache.output"]
    try:
        cache = CacheFolder(manifest_folder(given))
        roots = {
            read_checkpoint(folder.step(step)).position.identity.cache_root
            for step in folder.steps()
        }
        manifest = load_manifest(cache)
    except (UsageError, CorruptionError, StorageError) as error:
        return _CacheFacts({"cache": str(error)}, settings["train.model"])
    if others := roots - {manifest.root}:
        gone = f"{given} holds another cache now. This run was trained on root {min(others)}."
        return _CacheFacts({"cache": gone}, settings["train.model"])
    lineage = _lineage(given, manifest, settings)
    name = data_name([entry.name for entry in manifest.inputs])
    policy = settings["train.model"] or manifest.model
    return _CacheFacts(_data(manifest), policy, name, lineage, manifest.fingerprint)


def _data(manifest: Manifest) -> dict[str, str]:
    files = {
        entry.name: f"{counted(entry.rows, 'rows')}, sha256 {entry.sha256}"
        for entry in manifest.inputs
    }
    reasons = manifest.reasons.items()
    dropped = {f"left out: {why}": counted(rows, "rows") for why, rows in reasons}
    notes = {f"counted: {what}": f"{number:,}" for what, number in manifest.notes.items()}
    kept = f"{counted(manifest.rows, 'rows')} of {manifest.rows_in:,} read"
    completions = counted(manifest.branches, "completions")
    return {**files, "in the cache": f"{kept}, {completions}", **dropped, **notes}


def _lineage(cache: str, manifest: Manifest, settings: dict[str, Any]) -> dict[str, str]:
    began = settings["train.model"] or f"{manifest.model}, the reference"
    adapter = {"its adapter": manifest.adapter} if manifest.adapter else {}
    return {
        "policy began as": began,
        "reference": manifest.model,
        **adapter,
        "cache": cache,
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


# Worth a line of its own, where a method reports it.
SUMMARIZED = (
    "loss",
    "rewards/accuracies",
    "rewards/ties",
    "rewards/margins",
    "log_odds/accuracy",
    "log_odds/ratio",
)


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
        rows = before_and_after(self.measured)
        table = grid(("held-out rows", "before", "after"), rows) if rows else []
        return "\n".join([*lines, *table, *told, *self._looks()])

    def _looks(self) -> Iterator[str]:
        """Where the run can be looked at, and the command that asks the trained model."""
        if self.folder.report.exists():
            yield f"report in {self.folder.report}"
        whole = self.folder.loadable
        config = whole / "config.json"
        if self.ending != "finished" or not config.exists():  # an adapter alone
            return
        if "Classification" in str(read_json(config).get("architectures")):  # a reward model
            yield f"next: align score data.parquet --reward-model {whole}"
        else:
            yield f"next: align sample prompts.jsonl --model {whole}"


def outcome(folder: RunFolder, ending: Ending, signs: tuple[Sign, ...] = ()) -> Trained:
    """Reads the number of steps of a run, and its metrics; its report has found the signs."""
    known = read_ending(folder)
    ended = tuple(ended_how(known))
    if not folder.metrics.exists():
        logger.warning("%s is missing: what was measured is lost.", folder.metrics)
        return Trained(folder, ending, known.step if known else 0, Measured(), ended=ended)
    history = read_history(folder.metrics)
    measured = history.measured(known.model_step if known else None)
    return Trained(folder, ending, history.steps, measured, signs=signs, ended=ended)


def before_and_after(measured: Measured) -> list[list[str]]:
    """The main metrics of the held-out rows; none where nothing was measured twice."""
    before, after = measured.before, measured.after
    names = [name for name in SUMMARIZED if f"{EVAL}{name}" in before and f"{EVAL}{name}" in after]
    return [[name, *(f"{one[EVAL + name]:z.4f}" for one in (before, after))] for name in names]
