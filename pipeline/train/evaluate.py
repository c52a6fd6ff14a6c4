"""`align evaluate`: measures a run's model, or any model, on held-out rows and on tasks."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...schemas.batches import EvalSample, World
from ...schemas.cache import reference_named
from ...schemas.checkpoint import State
from ...schemas.config import ModelOptions, TrackingOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.engine.distributed import joined_world, naming_lost_peers
from ...stages.model.model_folder import DTYPE_NAMES, adapter_tensors, read_json, require_folder
from ...stages.report.eval_table import by_set, evaluation_csv, read_samples
from ...stages.report.model_card import with_section
from ...stages.report.two_runs import intervals_of
from ...stages.storage.disk import fs
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.locations import address_of, origin_of
from ...stages.storage.run.checkpoints import read_checkpoint
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.metrics_log import EVALUATE, MetricsLog, kept_lines, key_of, prefix_of
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import Run as TrackedRun
from ...stages.tracking.run_record import RunRecord
from ..jobs.object_inputs import local_model
from ..jobs.tracker_sync import send_files
from ..options.settings import BY_HAND, Settings, changed, read_yaml
from .load import identify, load, source_notes
from .records import RunRecords, table_kind
from .resume import require_same_run
from .run_report import gives_scores, read_results, require_finished, results_table, write_report
from .setup import Run, check, checked_caches
from .train import evaluated

LAST_LINES = 12  # of a harness that failed
Results = dict[str, Any]  # `sets` and `tasks` by name, each with metrics and intervals


def evaluate(
    settings: Settings,
    subject: str,
    home: Path,
    tasks: Sequence[str],
    tracking: TrackingOptions,
    progress: Progress,
) -> Results:
    """Measures a model; the results of a run also go to its report, cards and trackers.

    They replace those of the same sets and tasks in `home`. `tasks`: their names, and more words
    for the harness.
    """
    folder = RunFolder(Path(subject))
    is_run = folder.config.exists()
    if not is_run and (home / "results.json").exists():
        raise UsageError(f"{home} has results. Remove it, or choose another --output.")
    results, run, state = read_results(home / "results.json"), None, State()
    with joined_world() as world, naming_lost_peers(world):
        if is_run:
            run, state = _of_run(folder, settings, world)
            model = run.begins_as
        else:
            model = _of_folder(subject, settings.config.model)
            if settings.config.train.eval_cache:
                run = _on_caches(model, settings, world)
        _require_harness(world, tasks, model)
        results |= {"model": origin_of(model.path), "adapter": origin_of(model.adapter)}
        if run and (run.held_out or run.read_spec.eval_fraction):
            fs.make_folder(home)
            results["sets"] |= _measured(run, state, home, progress)
            results |= {"method": run.objective.name, "options": run.objective.values}
            results["identity"] = run.identity
        elif not tasks:
            raise UsageError(f"{subject}: there are no rows to measure. Name a --cache.")
        dtype = (run or settings).config.train.dtype
        run = None  # the harness needs the memory
    if world.rank:
        return results
    progress.log(f"measured: {reference_named(results['model'], results['adapter'])}")
    if tasks:
        if folder.is_merged:
            model = replace(model, path=str(folder.merged), adapter="")
        results["tasks"] |= _run_harness(model, dtype, tasks, home, progress)
    text = json.dumps(results, indent=2, default=str)
    fs.publish(home / "results.json", f"{text}\n".encode())
    if is_run:
        _publish(folder, results, tracking)
    return results


def _of_run(folder: RunFolder, settings: Settings, world: World) -> tuple[Run, State]:
    """A finished run that starts from its own model, and the state of its method."""
    ending, own = require_finished(folder), read_yaml(folder.config)
    same = {"train.output": str(folder.root), "train.resume": "auto"}
    same["train.eval_cache"] = own["train.eval_cache"]
    run = check(replace(settings, config=changed(settings.config, same)))
    identify(run, world)
    require_same_run(ending.identity, run)  # its cache, policy and settings must be unchanged
    if settings.origins.get("train.eval_cache") in BY_HAND:
        run.held_out = checked_caches(run.asked, settings.config.train, run.cache)
    state, model = State(), str(folder.model)
    if any(term.method.keeps_mean for term in run.asked.terms):
        step = ending.step if ending.model_step is None else ending.model_step
        state = State(methods=read_checkpoint(folder.step(step)).state.methods)
    if run.config.lora.enabled:
        return _starting_from(replace(run.begins_as, adapter=model), run, world), state
    return _starting_from(replace(run.begins_as, path=model, adapter=""), run, world), state


def _of_folder(subject: str, options: ModelOptions) -> ModelOptions:
    """The model in a folder, or the adapter in it with its base."""
    found = local_model(subject)
    require_folder(found, "Name the folder of a model, or of a run.")
    config = Path(found) / "adapter_config.json"
    if not config.exists():
        return replace(options, path=found, adapter="")
    settings = read_json(config)
    base, revision = str(settings.get("base_model_name_or_path")), settings.get("revision")
    if not Path(base).exists():
        base = address_of(f"{base}@{revision}" if revision else base, "model")
    base = local_model(base)
    require_folder(base, f"{config} names it as the adapter's base: name its folder there.")
    return replace(options, path=base, adapter=found)


def _on_caches(model: ModelOptions, settings: Settings, world: World) -> Run:
    """A run without training rows, which measures all rows of the named caches."""
    train, lora = settings.config.train, LoraOptions(enabled=bool(model.adapter))
    cache = train.eval_caches[0][1]
    train = replace(_measuring(train, model), cache=cache, eval_fraction=0.0, file_weights={})
    run = check(replace(settings, config=replace(settings.config, train=train, lora=lora)))
    run.read_spec = replace(run.read_spec, eval_fraction=1.0)
    return _starting_from(model, run, world)


def _starting_from(model: ModelOptions, run: Run, world: World) -> Run:
    run.begins_as, train = model, _measuring(run.config.train, model)
    run.config = replace(run.config, train=train, tracking=run.config.tracking.none())
    identify(run, world)
    return run


def _measuring(train: TrainOptions, model: ModelOptions) -> TrainOptions:
    """The settings without those that only training needs; every row is listed."""
    values: dict[str, Any] = {
        **{"model": model.path, "other_reference": True, "deepspeed": "zero0", "memory": ""},
        **{"gradient_checkpointing": False, "checkpoint_offload": False, "router_loss": 0.0},
        **{"best": "", "write_best": False, "patience": 0},
        **{"eval_table": sys.maxsize, "eval_text": False},
    }
    return replace(train, **values)


class _Kept(RunRecords):
    """Keeps an evaluation instead of recording it."""

    def evaluated(
        self, state: State, metrics: dict[str, float], samples: Sequence[EvalSample]
    ) -> None:
        self.metrics, self.samples = metrics, samples


def _measured(run: Run, state: State, home: Path, progress: Progress) -> Results:
    """The metrics of each held-out set, as training measures them; the rows go to `rows.csv`."""
    load(run, Progress(), learns=False)
    for note in source_notes(run.source, run.feed.held_out_sources) if not run.world.rank else ():
        progress.log(note)
    if run.begins_as.adapter:
        # peft loads 16 bits in float32, and a new adapter is trained in 16 bits.
        stored = {one.dtype for one in adapter_tensors(Path(run.begins_as.adapter))}
        for parameter in run.policy.parameters() if len(stored) == 1 else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, DTYPE_NAMES[min(stored)]))
    run.memory.remedy = "Take a smaller --tokens-per-batch."
    run.records = kept = _Kept(run, TrackedRun(run.folder), progress)
    evaluated(run, state)
    if run.world.rank:
        return {}
    table = home / "rows.csv"
    fs.publish(table, evaluation_csv(kept.samples, table_kind(run), decode=None).encode())
    rows, results = by_set(read_samples(table)), Results()
    for name, source in run.feed.held_out_sources.items():
        prefix, title = prefix_of(name), name or key_of(source.folder.root.resolve().name)
        metrics = {
            metric.removeprefix(prefix): value
            for metric, value in kept.metrics.items()
            if metric.startswith(prefix) and math.isfinite(value)
        }
        if source.train_rows and not run.held_out:
            title = "held-out"
        results[title] = {
            "cache": str(source.folder.root),
            "cache_id": source.manifest.root,
            "rows": run.feed.held_out_size(name).rows,
            "metrics": metrics,
            "intervals": intervals_of(rows[name], metrics),
        }
    return results


def _require_harness(world: World, tasks: Sequence[str], model: ModelOptions) -> None:
    # The harness would give it a random output layer.
    if tasks and gives_scores(folder := Path(model.adapter or model.path)):
        raise UsageError(f"{folder} is a reward model, which writes no text. Leave out --tasks.")
    if tasks and world.size > 1:
        raise UsageError("--tasks runs in one process. Give it in a command of its own.")
    if tasks and find_spec("lm_eval") is None:
        raise UsageError(
            "--tasks needs the package lm_eval. Install it: "
            "pip install 'align-cached-reference[evaluate]'"
        )


def _run_harness(
    model: ModelOptions, dtype: str, tasks: Sequence[str], home: Path, progress: Progress
) -> Results:
    """The metrics of tasks by lm-evaluation-harness, in a process of its own."""
    named = {"pretrained": Path(model.path).absolute(), "dtype": dtype}
    if model.adapter:
        named["peft"] = Path(model.adapter).absolute()
    words = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", *tasks]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in named.items())]
    words += ["--output_path", str(home / "lm_eval.json")]  # it adds the time to the name
    words += [] if model.device == "auto" else ["--device", model.device]
    fs.make_folder(home)
    log, before = home / "lm_eval.log", {*home.glob("lm_eval_*.json")}
    progress.log(f"{shlex.join(words)} > {log}")
    with log.open("wb") as file:
        code = subprocess.run(words, stdout=file, stderr=file, check=False).returncode
    new = sorted({*home.glob("lm_eval_*.json")} - before)
    if code or not new:
        last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise UsageError("\n  ".join([f"lm_eval ended with exit code {code}. {log}:", *last]))
    found = json.loads(fs.read_bytes(new[-1]))["results"]
    return {task: {"metrics": _numbers(values), "intervals": {}} for task, values in found.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a task, which the harness names `acc,none` and `acc_stderr,none`.

    JSON has no NaN, which the harness gives as the error of a single row.
    """
    found = {name: one for name, one in values.items() if isinstance(one, float | int)}
    return {
        name.removesuffix(",none"): one
        for name, one in found.items()
        if "," in name and math.isfinite(one)
    }


def _publish(folder: RunFolder, results: Results, tracking: TrackingOptions) -> None:
    """Adds the results to the run's model cards, report and trackers."""
    every, rows = {**results["sets"], **results["tasks"]}, results_table(results)[1:]
    cells = {name: f"{value} ({bounds})" if bounds else value for name, value, bounds in rows}
    cards = [one / "README.md" for one in (folder.model, folder.merged)]
    cards = [card for card in cards if card.exists()]
    with owner_lock(folder.root, "evaluate"):
        for card in cards:
            text = with_section(fs.read_bytes(card).decode(), "Evaluation", cells)
            fs.publish(card, text.encode())
        write_report(folder.root)
        if RunRecord.find(folder):
            lines, _ = kept_lines(folder.metrics, keep_through=sys.maxsize)
            with closing(MetricsLog(folder.metrics, lines)) as log:
                numbers = {
                    f"{EVALUATE}{name}/{metric}": value
                    for name, found in every.items()
                    for metric, value in found["metrics"].items()
                }
                log.append(numbers, step=require_finished(folder).step)
                log.sync()
        send_files(folder, [*cards, folder.report, folder.results], tracking)
