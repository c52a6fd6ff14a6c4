"""`align rounds`: each round samples from the last policy, judges, selects, trains and evaluates.

A step returns at once if its output is complete, so the same loop resumes after any kill.

rounds.json                           settings and digests that must match in every round
rounds.jsonl                          a line per finished round; round 0 is the first model
prompts.parquet, held-out.parquet     prompts to train on, and prompts to evaluate on
answers/samples, answers/judgments    stored answers of models and judges, for all rounds
round-001/samples, judged, selected, cache, run
round-001/eval-samples, eval-judged   the policy's answers to held-out prompts, judged
round-001/eval-against-first, eval-against-previous   instead of eval-judged for a pairwise judge
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ...schemas.config import Config
from ...schemas.errors import (
    CorruptionError,
    FingerprintError,
    Interrupted,
    counted,
    damaged,
    differences,
)
from ...schemas.json_codec import CodecError, from_signed_json, to_signed_json
from ...schemas.round_options import ServerOptions
from ...stages.model.reference import HfReference
from ...stages.report.text_tables import grid
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.output_folder import OutputFolder
from ...stages.storage.records import Records
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import recorded, tagged
from ...stages.tracking.run_record import ROUND_TAG, ROUNDS_TAG
from ...stages.tracking.run_texts import data_name, run_name
from ..options.settings import Settings, changed, without_secrets
from ..precompute.precompute import precompute
from ..tables.judge import judge
from ..tables.sample import sample
from ..tables.select_rows import select
from ..train.run_history import read_history
from ..train.setup import check
from ..train.train import train
from .round_prompts import prompts_of_round, write_prompts
from .rounds_checks import Rounds, digest_of_model, open_rounds
from .rounds_evaluation import evaluate, stop_reason
from .served_policy import ServedPolicy

# The metrics of a training that a round repeats, from the last line of metrics.jsonl.
TRAIN_METRICS = (
    "loss",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/ties",
    "kl/raw",
    "kl/tokens",
)


@dataclass(frozen=True)
class FinishedRound:
    """A line of rounds.jsonl."""

    round: int
    model: str  # the digest of the policy
    metrics: dict[str, float]


@dataclass(frozen=True)
class RoundsRecord:
    """The content of rounds.json."""

    binding: dict[str, str]  # settings and digests that must match in every round


ROUNDS_RECORD = Records(RoundsRecord, remedy="Restore it from a copy.")


def run_rounds(settings: Settings, *, progress: Progress) -> str:
    """Runs all rounds that are not finished; returns a table of all rounds."""
    rounds = open_rounds(settings)
    root, config = rounds.root, rounds.config
    OutputFolder(root, "rounds").prepare()
    with owner_lock(root, "rounds"):
        _make_folder(root / "answers")
        lines = _finished_rounds(rounds)
        num_before, stopped = len(lines), ""
        for line in lines:
            stopped = stopped or stop_reason(line.round, line.metrics, config.rounds)
        if stopped or num_before > config.rounds.count:
            return _text(rounds, lines, num_before, stopped)

        write_prompts(root / "prompts.parquet", rounds.prompts)
        if rounds.held_out:
            write_prompts(root / "held-out.parquet", rounds.held_out)
        name = run_name(config.model.path, "rounds", data_name(config.data.files))
        tag = {ROUNDS_TAG: str(root.resolve())}
        with recorded(config.tracking, root, "rounds", name=name) as parent:
            parent.set_tags(tag)
            parent.log_params(without_secrets(rounds.must_match))
            for line in lines:
                parent.log_metrics(line.metrics, step=line.round)
            while len(lines) <= config.rounds.count and not stopped:
                number = len(lines)
                progress.log(f"round {number} of {config.rounds.count}")
                try:
                    with tagged({**tag, ROUND_TAG: str(number)}, parent):
                        metrics = _round(rounds, number, progress)
                except Interrupted as stop:  # leaves out the resume command of the training
                    raise Interrupted(stop.signal_number, at=stop.at) from None
                if metrics is None:
                    stopped = f"train.max_time stopped round {number}; the same command resumes it"
                    break
                model = digest_of_model(rounds.policy(number))
                lines.append(FinishedRound(number, model, metrics))
                fs.publish(root / "rounds.jsonl", "".join(map(to_signed_json, lines)).encode())
                parent.set_tags({f"align.round-{number:03d}.model": model})
                parent.log_metrics(metrics, step=number)
                stopped = stop_reason(number, metrics, config.rounds)
        return _text(rounds, lines, num_before, stopped)


def _finished_rounds(rounds: Rounds) -> list[FinishedRound]:
    """The finished rounds; refuses changed settings, and a changed last policy.

    Settings may change until the first training has saved a checkpoint. Samples and judgments made
    by then are still found by their own keys.
    """
    root, run = rounds.root, RunFolder(rounds.folder(1) / "run")
    for name in ("rounds.json", "rounds.jsonl", "prompts.parquet", "held-out.parquet"):
        fs.drop_drafts(root / name)
    path, lines = root / "rounds.jsonl", list[FinishedRound]()
    if path.exists():
        try:
            found = fs.read_bytes(path).splitlines(keepends=True)
            lines = [from_signed_json(FinishedRound, line) for line in found]
        except CodecError as error:
            raise damaged(path, str(error), "Restore it from a copy.") from error
    before = ROUNDS_RECORD.find(root / "rounds.json")
    now = RoundsRecord(dict(rounds.must_match))
    changes = differences(before.binding, now.binding, had="the rounds have") if before else {}
    if changes and (len(lines) > 1 or run.steps() or run.model.exists()):
        retrain = f"remove {run.root} to train it again, or " if len(lines) < 2 else ""
        raise FingerprintError(
            f"The rounds in {root} were made with other settings or inputs:\n  "
            + "\n  ".join(changes.values())
            + f"\nUndo the change, {retrain}choose another --output."
        )
    if changes:
        lines = []  # the first model is evaluated again
        fs.unlink(path)
        fs.fsync(root)
        # A cache never changes, and only settings of the training keep its rows the same.
        if not all(name.startswith(("train.", "lora.", "method.")) for name in changes):
            fs.remove_tree(rounds.folder(1) / "cache")
    if before != now:
        ROUNDS_RECORD.replace(root / "rounds.json", now)
    if lines:
        last = len(lines) - 1
        policy = rounds.policy(last)
        if digest_of_model(policy) != lines[last].model:
            raise CorruptionError(
                f"{policy.path} is not the model that round {last} trained. Restore it from a "
                "copy, or choose another --output."
            )
    return lines


def _make_folder(path: Path) -> None:
    """Makes a folder, durably, before anything is written to it."""
    fs.make_folder(path)
    fs.fsync(path.parent)


def _round(rounds: Rounds, number: int, progress: Progress) -> dict[str, float] | None:
    """Runs the missing steps of a round, and returns its metrics; None if train.max_time ended it.

    Round 0 only evaluates the first model.
    """
    config, folder = rounds.config, rounds.folder(number)
    options, metrics = config.rounds, dict[str, float]()
    _make_folder(folder)
    if number:
        # Sample from the last policy, judge the samples, and select rows.
        prompts = rounds.root / "prompts.parquet"
        if size := options.prompts_per_round:
            prompts = folder / "prompts.parquet"
            own = prompts_of_round(rounds.prompts, number, size, config.sample.seed)
            write_prompts(prompts, own)
        samples, judged, selected = (
            str(folder / name) for name in ("samples", "judged", "selected")
        )
        _sample(rounds, number - 1, changed(config, {"sample.output": samples}), prompts, progress)
        judging = changed(config, {"judge.output": judged, "tokens.chat_template": ""})
        result = judge(judging, samples, progress=progress, sampler=rounds.sampler)
        _log_result(result.text(), progress)
        selection = select(changed(config, {"select.output": selected}), judged)
        _log_result(selection.text(), progress)
        gc.collect()  # frees the models that sampled and judged
        torch.cuda.empty_cache()

        # Compute the reference's log-probs; the caches of earlier rounds are reused.
        policy, cache, reuse = rounds.policy(number - 1), str(folder / "cache"), config.cache.reuse
        reference = policy
        if options.reference == "fixed":
            reference = rounds.policy(0)
            reuse = [*reuse, *(str(rounds.folder(one) / "cache") for one in range(1, number))]
        scoring = {"data.files": [selected], "cache.output": cache, "cache.reuse": reuse}
        scored = precompute(
            changed(config, {"model": reference, **scoring}),
            HfReference(reference, own_digests()),
            progress=progress,
        )
        _log_result(scored.text(), progress)

        # Train the last policy.
        is_other = policy != reference
        training = {
            "model": reference,
            "train.cache": cache,
            "train.model": policy.path if is_other else "",
            "train.other_reference": is_other,
            "train.output": str(folder / "run"),
        }
        trained = train(
            check(Settings(changed(config, training), rounds.origins)), progress=progress
        )
        gc.collect()  # frees the engine, which is in a reference cycle with its hooks
        torch.cuda.empty_cache()
        if trained.ending != "finished":
            return None
        _log_result(trained.text(), progress)
        last = read_history(folder / "run" / "metrics.jsonl").learned.row(-1, named=True)
        for name in TRAIN_METRICS:
            if last.get(name) is not None:
                metrics[f"train/{name}"] = float(last[name])

    if rounds.held_out:
        eval_options = {
            "sample.n": options.eval_n,
            "sample.temperature": options.eval_temperature,
            "sample.output": str(folder / "eval-samples"),
        }
        with tagged({"align.prompts": "held out"}):
            prompts = rounds.root / "held-out.parquet"
            _sample(rounds, number, changed(config, eval_options), prompts, progress)
            metrics |= evaluate(rounds, number, progress=progress)
    return metrics


def _sample(rounds: Rounds, number: int, config: Config, prompts: Path, progress: Progress) -> None:
    """Samples from the policy of a round, in this process or through rounds.serve."""
    # The server in the settings is the judge's.
    own = {"data.files": [str(prompts)], "server": ServerOptions()}
    config = changed(config, {"model": rounds.policy(number), **own})
    sampler = None
    with ExitStack() as stack:
        if config.rounds.serve:
            log = Path(config.sample.output).with_name("server.log")
            sampler = ServedPolicy(config, rounds.config.server, log, stack, progress)
        _log_result(sample(config, progress=progress, sampler=sampler).text(), progress)


def _log_result(text: str, progress: Progress) -> None:
    """Logs the result of a step without its hint at the next command, which rounds run."""
    for line in text.splitlines():
        if not line.startswith("next: "):
            progress.log(line)


# The columns of the table: the metric and its format.
COLUMNS = {
    "win rate": ("win_rate/previous", ".3f"),
    "95 %": ("", ""),
    "vs first": ("win_rate/first", ".3f"),
    "score": ("score", ".3f"),
    "tokens": ("tokens", ".1f"),
    "growth": ("length_growth", ".2f"),
    "ties": ("ties/previous", ".3f"),
    "repeated": ("repeated_ngrams", ".3f"),
}


def _text(rounds: Rounds, lines: Sequence[FinishedRound], num_before: int, stopped: str) -> str:
    """The summary for the terminal: a table of the rounds, and the folder of the last policy."""
    rows, notes = [], []
    for line in lines if rounds.held_out else ():
        metrics = {name.removeprefix("held_out/"): value for name, value in line.metrics.items()}
        values = {
            name: format(metrics[metric], form) if metric in metrics else "-"
            for name, (metric, form) in COLUMNS.items()
        }
        if line.round:
            low, high = metrics["win_rate/previous/low"], metrics["win_rate/previous/high"]
            values["95 %"] = f"{low:.3f}-{high:.3f}"
            if unjudged := int(metrics["unjudged/previous"]):
                total = counted(int(metrics["comparisons/previous"]) + unjudged, "comparisons")
                notes.append(
                    f"round {line.round}: the win rate leaves out {unjudged:,} of {total} with the "
                    "previous policy, which have no verdict"
                )
        rows.append([str(line.round), *values.values()])
    last, last_before = max(len(lines) - 1, 0), max(num_before - 1, 0)
    text = [*grid(["round", *COLUMNS], rows), *notes] if rows else []
    finished_now = counted(last - last_before, "rounds")
    text.append(f"{finished_now} finished now, {last_before:,} finished before")
    text += [stopped] if stopped else []
    text.append(f"last policy: {rounds.policy(last).path}" if last else f"in {rounds.root}")
    return "\n".join(text)
