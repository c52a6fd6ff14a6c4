"""`report.html`: a run on one page, from its folder and its cache's manifest."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.cache import Manifest
from ...schemas.config import Config
from ...schemas.data_options import TokenOptions
from ...schemas.errors import CorruptionError, StorageError, UsageError, counted, log_failure
from ...schemas.safe_text import beginning
from ...stages.methods.table import objective_of
from ...stages.model.model_folder import read_json
from ...stages.report.charts import plain
from ...stages.report.eval_table import REWARD, TEXTS, by_set, kind_of, read_answers, read_samples
from ...stages.report.page import Section, render_page
from ...stages.report.row_margins import join_margins, learned_rows, read_margins
from ...stages.report.run_curves import LEARNING, completion_charts, curves_of, further
from ...stages.report.run_warnings import Measurements, find_warnings
from ...stages.report.text_tables import duration, grid
from ...stages.storage.cache import Cache
from ...stages.storage.copies import manifest_folder
from ...stages.storage.disk import fs
from ...stages.storage.disk.lines import read_lines
from ...stages.storage.disk.locks import is_owned
from ...stages.storage.locations import origin_of
from ...stages.storage.run.checkpoints import read_checkpoint
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ...stages.tracking.metrics_log import EVAL, prefix_of
from ...stages.tracking.run_texts import data_name, model_name
from ..jobs.signals import RESUME
from ..options.settings import flatten, read_yaml, without_secrets
from ..options.settings_table import as_flags
from .run_history import History, Measured, curves, read_history

if TYPE_CHECKING:
    import polars as pl

    from ...schemas.checkpoint import RunEnding, RunStatus

logger = logging.getLogger("align")

# Metrics with a line each, if the method reports them.
SUMMARIZED = (
    "loss",
    "rewards/accuracies",
    "rewards/ties",
    "rewards/margins",
    "log_odds/accuracy",
    "log_odds/ratio",
)
HOW = {
    "finished": "finished",
    "time": "stopped by train.max_time",
    "signal": "stopped by a signal",
    "failed": "failed",
}
PROMPT_SETTINGS = ("data.wrap", "tokens.bos", "tokens.date")
MOST_NAMED = 20  # rows of a kind
MOST_SHOWN = 4000  # characters of an answer


def training_folder(root: Path) -> RunFolder:
    """The folder of a started training run; other folders are refused."""
    folder = RunFolder(root)
    if not (folder.metrics.exists() and folder.config.exists()):
        raise UsageError(
            f"{root} holds no training run: it lacks {folder.metrics.name} or "
            f"{folder.config.name}. Name the --output of `align train`."
        )
    return folder


def require_finished(folder: RunFolder) -> RunEnding:
    """The final status of a finished run; an unfinished one is refused."""
    ending = read_ending(folder)
    if ending is None or ending.ending != "finished" or not folder.model.exists():
        raise UsageError(
            f"{folder.root} is not finished and has no trained model. Resume it with --resume auto."
        )
    return ending


def method_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the method, by their names without `method.`."""
    return {
        name.removeprefix("method."): value
        for name, value in settings.items()
        if name.startswith("method.")
    }


def write_report(root: Path) -> dict[str, str]:
    """Writes the page of a run, finished or not; returns its warnings."""
    folder = training_folder(root)
    with log_failure("No table of training rows"):
        if parts := folder.rows_written():
            join_margins(parts, folder.rows)
    settings, history = read_yaml(folder.config), read_history(folder.metrics)
    ending, first = read_ending(folder), history.sets[0]
    best = settings["train.best"] or f"{prefix_of(first)}loss"
    learned = curves(history.learned)
    held_out = {name: curves(history.held_out, prefix_of(name)) for name in history.sets}
    tables: dict[str, dict[int, pl.DataFrame]] = {}  # by set and step
    for step, path in folder.evaluations().items():
        for name, table in by_set(read_samples(path).drop(TEXTS, strict=False)).items():
            tables.setdefault(name, {})[step] = table
    warnings = find_warnings(Measurements(learned, held_out[first], tables.get(first, {})))

    # The tables of held-out completions.
    completions = []
    for name, of_set in tables.items():
        step, last = max(of_set), of_set[max(of_set)]
        note = (
            f"{counted(len(last), 'completions')} of the first held-out rows of the cache, whose "
            f"order is random, after step {step:,}."
        )
        if kind_of(last.columns) == "log-ratios":
            note += " A log-ratio is log(policy / reference), summed over a completion."
        if REWARD in last.columns:
            note += " A reward is the value that the method's loss compares."
        title = f"Held-out completions{f' of {name}' if name else ''}"
        completions.append(Section(title, figures=completion_charts(of_set), note=note))

    answers = []
    for one in read_answers(folder.answers).iter_rows(named=True):
        card = {"prompt": beginning(one["prompt"], MOST_SHOWN)}
        for when in ("before", "after"):
            heading = when if one[f"{when}_ended"] else f"{when}, cut"
            card[heading] = beginning(one[when], MOST_SHOWN)
        answers.append(card)
    used = {
        name: str(value)
        for name, value in without_secrets(settings).items()
        if name.partition(".")[0] in ("train", "method", "lora", "model")
    }
    manifest, data, lineage = _cache_facts(folder, settings)
    page = render_page(
        folder.root.resolve().name,
        [
            Section("Warnings", facts=warnings),
            Section(
                "Before and after",
                table=before_and_after(history.measured(ending.model_step if ending else None)),
            ),
            Section("Evaluation", table=results_table(read_results(folder.results))),
            Section("Learning", figures=curves_of(LEARNING, learned, held_out, best)),
            *completions,
            Section(
                "Training rows",
                facts=_row_facts(folder),
                note="Reward margins in each step that trained on the row, before the update. "
                "`align inspect CACHE --row ID` shows a row.",
            ),
            Section("Answers before training and after", texts=answers),
            Section("Data", facts=data),
            Section("Lineage", facts=lineage),
            Section(
                "Cache fingerprint", facts=manifest.fingerprint if manifest else {}, is_folded=True
            ),
            Section("Settings", facts=used, is_folded=True),
            Section(
                "Speed, memory and more",
                figures=curves_of(further(learned, *held_out.values()), learned, held_out, best),
                is_folded=True,
            ),
        ],
        lead=_lead(folder, ending, history, settings["train.method"]),
        alert=_unfinished(folder, ending, history),
        facts=_head(settings, history, manifest),
    )
    fs.drop_drafts(folder.report)
    fs.publish(folder.report, page.encode())
    return warnings


def before_and_after(measured: Measured) -> list[list[str]]:
    """A table of the first and last values of the main metrics."""
    is_held_out = measured.rows == "held out"
    rows = []
    for of_set, name in itertools.product(measured.sets, SUMMARIZED):
        metric = f"{prefix_of(of_set)}{name}" if is_held_out else name
        moments = [one.get(metric) for one in (measured.before, measured.after)]
        figures = ["-" if one is None else f"{one:z.4f}" for one in moments]
        if moments[0] is not None:
            rows.append([metric.removeprefix(EVAL), *figures])
    head = ["held-out rows", "before", "after"]
    if not is_held_out:
        head = ["training steps", "first", "last"]
    return [head, *rows] if rows else []


def read_results(file: Path) -> dict[str, Any]:
    """The results of `align evaluate`; without any if there is no file."""
    try:
        found: dict[str, Any] = json.loads(fs.read_bytes(file)) if file.exists() else {}
        return {"sets": {}, "tasks": {}, **found}
    except ValueError as error:
        raise CorruptionError(f"{file} is damaged ({error}). Remove it.") from error


def results_table(results: Mapping[str, Any]) -> list[list[str]]:
    """A table of the results of `align evaluate`; empty if there are none."""
    rows = []
    for name, found in {**results["sets"], **results["tasks"]}.items():
        shown = SUMMARIZED if name in results["sets"] else found["metrics"]
        for metric in shown:
            if (value := found["metrics"].get(metric)) is not None:
                bounds = (f"{one:z.4f}" for one in found["intervals"].get(metric, ()))
                rows.append([f"{name}: {metric}", f"{value:z.4f}", " to ".join(bounds)])
    return [["evaluation", "value", "95 % interval"], *rows] if rows else []


def _lead(folder: RunFolder, ending: RunEnding | None, history: History, method: str) -> list[str]:
    """Sentences on the progress and the status of the run."""
    how = HOW[ending.ending] if ending else "not finished"
    lines = [f"{method}, {counted(history.steps, 'steps')}, {how}.", *_notes_on(ending)]
    lines += [f"Resumed with a change: {change}." for change in (ending.changes if ending else ())]
    # Steps that were repeated after a resume may have been applied.
    shares = curves(history.learned).get("step_applied", ())
    applied = {step for step, share in shares if share == 1}
    failed = sorted(_not_applied(folder) - applied)
    if failed:
        shown = ", ".join(f"{step:,}" for step in failed[:10])
        more = f" and {len(failed) - 10:,} more" if len(failed) > 10 else ""
        lines.append(f"NaN or infinity: steps {shown}{more} were not applied (nonfinite.jsonl).")
    return lines


def _notes_on(ending: RunEnding | None) -> list[str]:
    """Sentences on an early end, and on a model of another step than the last."""
    lines = []
    if ending and ending.ending == "finished" and ending.reason:
        steps = counted(ending.total_steps, "steps")
        lines = [f"It ended early, before its {steps}: {ending.reason}."]
    if ending and ending.model_step is not None:
        lines.append(
            f"The model is the best one, of step {ending.model_step:,} (train.write_best)."
        )
    return lines


def _unfinished(folder: RunFolder, ending: RunEnding | None, history: History) -> list[str]:
    """For an unfinished run: the reason, the last good step, and how to resume."""
    if ending is None and is_owned(folder.root):
        return ["The run is active: a process has its folder locked."]
    if ending is None:
        lines = [
            f"The run was killed, or its machine stopped, after logging step {history.steps:,}."
        ]
    elif ending.ending == "finished":
        return []
    elif ending.ending == "failed":
        failed, step = _not_applied(folder), ending.step
        while step in failed:
            step -= 1
        lines = [
            ending.reason or "The run failed; the reason is in its log.",
            f"The last good step is {step:,} of {ending.total_steps:,}.",
        ]
    else:
        lines = [f"The run stopped after step {ending.step:,} of {ending.total_steps:,}."]
    saved = folder.steps()
    if not saved:
        return [*lines, f"There is no checkpoint. {RESUME}: the run starts from the first step."]
    return [*lines, f"{RESUME}: the run resumes from the checkpoint of step {saved[-1]:,}."]


def _not_applied(folder: RunFolder) -> set[int]:
    """The steps that were not applied when they were first run; damaged lines are skipped."""
    steps = set[int]()
    for line in read_lines(folder.nonfinite) if folder.nonfinite.exists() else ():
        try:
            steps.add(int(json.loads(line.text)["step"]))
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: a damaged line is skipped.", folder.nonfinite)
    return steps


def _head(
    settings: Mapping[str, Any], history: History, manifest: Manifest | None
) -> dict[str, str]:
    """The facts that distinguish a run from others, by name, as far as they are known."""
    options = objective_of(settings["train.method"], method_options(settings)).values
    first, last = history.times
    facts = {
        "model": model_name(settings["train.model"] or (manifest.model if manifest else "")),
        "method": settings["train.method"],
        "data": data_name([entry.name for entry in manifest.inputs]) if manifest else "",
        "first step": f"{first:%Y-%m-%d %H:%M} UTC" if first else "",
        "duration": duration((last - first).total_seconds()) if first and last else "",
        "learning rate": plain(settings["train.lr"]),
        **{name: plain(value) for name, value in options.items() if name.endswith("beta")},
        "rows in a step": f"{settings['train.batch_size']:,}",
    }
    return {name: value for name, value in facts.items() if value}


def _row_facts(folder: RunFolder) -> dict[str, str]:
    """The training rows that were learned, never correct, and forgotten, if margins were logged."""
    rows = learned_rows(read_margins(folder.rows))
    if rows.is_empty():
        return {}
    most = max(rows["times"])
    facts = {"training rows": f"{len(rows):,}, each trained on up to {counted(most, 'times')}"}
    for title, column in (
        ("correct the last time (margin above 0)", "correct"),
        ("never correct", "never"),
        ("forgotten (correct, later incorrect)", "forgotten"),
    ):
        ids = rows.filter(column)["row_id"].to_list()
        facts[title] = f"{len(ids):,} ({len(ids) / len(rows):.1%})"
        if ids and column != "correct":
            more = f" and {len(ids) - MOST_NAMED:,} more" if len(ids) > MOST_NAMED else ""
            facts[title] += f": {', '.join(ids[:MOST_NAMED])}{more}"
    return facts


def _cache_facts(
    folder: RunFolder, settings: Mapping[str, Any]
) -> tuple[Manifest | None, dict[str, str], dict[str, str]]:
    """The manifest of the run's cache, and its data and lineage; None and the reason if missing."""
    location = settings["train.cache"] or settings["cache.output"]
    try:
        manifest = Cache(manifest_folder(location)).manifest()
        roots = {read_checkpoint(folder.step(step)).identity.cache_root for step in folder.steps()}
        if others := roots - {manifest.root}:
            raise UsageError(
                f"{location} has another cache now; this run was trained on cache {min(others)}."
            )
    except (UsageError, CorruptionError, StorageError) as error:
        return None, {"cache": str(error)}, {}
    files = {
        entry.name: f"{counted(entry.rows, 'rows')}, sha256 {entry.sha256}"
        for entry in manifest.inputs
    }
    kept = f"{counted(manifest.rows, 'rows')} of {manifest.rows_in:,} read"
    data = {
        **files,
        "in the cache": f"{kept}, {counted(manifest.branches, 'completions')}",
        **{f"rejected: {why}": counted(rows, "rows") for why, rows in manifest.reasons.items()},
        **{f"noted: {what}": f"{number:,}" for what, number in manifest.notes.items()},
    }
    lineage = {
        "policy before training": settings["train.model"] or f"{manifest.model}, the reference",
        "reference": manifest.model,
        "reference adapter": manifest.adapter,
        "cache": location,
        "cache id": manifest.root,
        "reference weights": manifest.fingerprint["model.weights"],
    }
    return manifest, data, {name: value for name, value in lineage.items() if value}


@dataclass(frozen=True)
class Trained:
    """An ended run with its first and last metrics, for the terminal."""

    folder: RunFolder
    ending: RunStatus
    steps: int
    measured: Measured
    is_old: bool = False  # whether it had ended before this command
    notes: tuple[str, ...] = ()  # on an early end, and on the step of the model
    warnings: Mapping[str, str] = field(default_factory=dict)
    reading: Mapping[str, str] = field(default_factory=dict)  # from `reading_of`

    def text(self) -> str:
        """The metrics before and after, the warnings, and the paths of model and report."""
        already = " already: the run is finished, nothing was trained" if self.is_old else ""
        lines = [f"{self.folder.root}: {counted(self.steps, 'steps')} done{already}", *self.notes]
        if self.ending == "finished":
            adapter = f" (its adapter in {self.folder.model})" if self.folder.is_merged else ""
            lines.append(f"model in {self.folder.loadable}{adapter}")
        else:
            lines.append(
                "stopped by train.max_time; resume with the same command and --resume auto"
            )
        if self.measured.rows == "held out" and self.measured.after:
            head, *rows = before_and_after(self.measured)
            lines += grid(head, rows)
        lines += [f"{name}: {warning}" for name, warning in self.warnings.items()]
        if self.folder.report.exists():
            lines.append(f"report in {self.folder.report}")
        if self.ending == "finished":
            model = self.folder.loadable
            lines += use_of_model(model, str(model), self.reading)
        return "\n".join(lines)


def use_of_model(model: Path, named: str, reading: Mapping[str, str]) -> Iterator[str]:
    """The command that uses a trained model by this name, if there is one."""
    config, adapter_config = model / "config.json", model / "adapter_config.json"
    command, data, settings = "sample", "prompts.jsonl", {"model.path": named}
    if config.exists():
        if gives_scores(model):
            command, data, settings = "score", "data.parquet", {"rewards.model": named}
    elif adapter_config.exists():
        base = read_json(adapter_config)["base_model_name_or_path"]
        if gives_scores(model) or not Path(base).is_dir():
            return
        settings = {"model.path": origin_of(base), "model.adapter": named}
    else:
        return
    yield f"next: align {command} {data} {as_flags({**settings, **reading}, command)}"


def gives_scores(model: Path) -> bool:
    """Whether the model or adapter in a folder is a reward model."""
    if (adapter := model / "adapter_config.json").exists():
        return bool(read_json(adapter).get("task_type") == "SEQ_CLS")
    return "Classification" in str(read_json(model / "config.json").get("architectures"))


def reading_of(manifest: Manifest, tokens: TokenOptions) -> dict[str, str]:
    """The settings, other than defaults, under which a model reads a prompt as in the cache."""
    defaults = flatten(Config())
    found = {name: manifest.fingerprint.get(name) for name in PROMPT_SETTINGS}
    found["tokens.chat_template"] = tokens.chat_template
    return {name: value for name, value in found.items() if value and value != defaults[name]}


def trained_before(folder: RunFolder, reading: Mapping[str, str], *, writes: bool) -> Trained:
    """A run that had ended before; with `writes`, a missing report is written."""
    warnings: Mapping[str, str] = {}
    if writes and not folder.report.exists():
        with log_failure("No report"):
            warnings = write_report(folder.root)
    return replace(outcome(folder, "finished", warnings, reading), is_old=True)


def outcome(
    folder: RunFolder,
    ending: RunStatus,
    warnings: Mapping[str, str] | None = None,
    reading: Mapping[str, str] | None = None,
) -> Trained:
    """Reads the steps and metrics of a run; `warnings` come from its report."""
    known = read_ending(folder)
    steps, measured = known.step if known else 0, Measured()
    if folder.metrics.exists():
        history = read_history(folder.metrics)
        steps, measured = history.steps, history.measured(known.model_step if known else None)
    else:
        logger.warning("%s is missing: the metrics are lost.", folder.metrics)
    notes = tuple(_notes_on(known))
    return Trained(
        folder, ending, steps, measured, notes=notes, warnings=warnings or {}, reading=reading or {}
    )
