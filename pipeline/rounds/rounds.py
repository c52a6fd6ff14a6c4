"""Rounds: sample from the last policy, judge, select, score, train and evaluate, over and over.

Each step returns at once where its output is complete, so the same loop resumes after any kill.

rounds.json                           what binds all rounds: settings, digests of what they name
rounds.jsonl                          a line for each finished round; of round 0, the first model
prompts.parquet, held-out.parquet     the two sides of the split
answers/samples, answers/judgments    what was paid for, shared by all rounds
round-001/samples, judged, selected, cache, run
round-001/eval-samples, eval-judged   held-out answers of its policy; instead of the second, for
                                      a judge that compares: eval-against-first, -previous
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

TRAINED = ["loss", "rewards/margins", "rewards/accuracies", "rewards/ties", "kl/raw", "kl/tokens"]


@dataclass(frozen=True)
class Finished:
    """A line of rounds.jsonl, with its digest."""

    round: int
    model: str  # its digest
    metrics: dict[str, float]


@dataclass(frozen=True)
class Begun:
    """What rounds.json holds."""

    binding: dict[str, str]


BEGUN = Records(Begun, remedy="Restore it from a copy.")


def run_rounds(settings: Settings, *, progress: Progress) -> str:
    """Goes through all rounds that are not finished; a table of all of them."""
    rounds = open_rounds(settings)
    root, config = rounds.root, rounds.config
    OutputFolder(root, "rounds").prepare()
    with owner_lock(root, "rounds"):
        _make_folder(root / "answers")
        lines = _finished(rounds)
        known, stopped = len(lines), ""
        for line in lines:
            stopped = stopped or stop_reason(line.round, line.metrics, config.rounds)
        if stopped or known > config.rounds.count:
            return _text(rounds, lines, known, stopped)

        write_prompts(root / "prompts.parquet", rounds.prompts)
        if rounds.held_out:
            write_prompts(root / "held-out.parquet", rounds.held_out)
        name = run_name(config.model.path, "rounds", data_name(config.data.files))
        tag = {ROUNDS_TAG: str(root.resolve())}
        with recorded(config.tracking, root, "rounds", name=name) as parent:
            parent.set_tags(tag)
            parent.log_params(without_secrets(rounds.binding))
            for line in lines:
                parent.log_metrics(line.metrics, step=line.round)
            while len(lines) <= config.rounds.count and not stopped:
                number = len(lines)
                progress.log(f"round {number} of {config.rounds.count}")
                try:
                    with tagged({**tag, ROUND_TAG: str(number)}, parent):
                        metrics = _round(rounds, number, progress)
                except Interrupted as stop:  # a training would name a way on of its own
                    raise Interrupted(stop.signal_number, at=stop.at) from None
                if metrics is None:
                    stopped = f"train.max_time stopped round {number}; the same command continues"
                    break
                model = digest_of_model(rounds.policy(number))
                lines.append(Finished(number, model, metrics))
                fs.publish(root / "rounds.jsonl", "".join(map(to_signed_json, lines)).encode())
                parent.set_tags({f"align.round-{number:03d}.model": model})
                parent.log_metrics(metrics, step=number)
                stopped = stop_reason(number, metrics, config.rounds)
        return _text(rounds, lines, known, stopped)


def _finished(rounds: Rounds) -> list[Finished]:
    """The lines of finished rounds; refuses other settings than theirs, and a changed policy.

    Settings may change until the first training has saved something: what was sampled and judged
    by then is found again by its own keys.
    """
    root, run = rounds.root, RunFolder(rounds.folder(1) / "run")
    for name in ("rounds.json", "rounds.jsonl", "prompts.parquet", "held-out.parquet"):
        fs.drop_drafts(root / name)
    begun, lines = BEGUN.find(root / "rounds.json"), _read_lines(root / "rounds.jsonl")
    now = Begun(dict(rounds.binding))
    found = differences(begun.binding, now.binding, had="the rounds have") if begun else {}
    if found and (len(lines) > 1 or run.steps() or run.model.exists()):
        others = f"remove {run.root} to train it anew, or " if len(lines) < 2 else ""
        raise FingerprintError(
            f"The rounds in {root} are made from something else. What differs:\n  "
            + "\n  ".join(found.values())
            + f"\nUndo the change, {others}choose another --output."
        )
    if found:
        lines = []  # the first model is measured again
        fs.unlink(root / "rounds.jsonl")
        fs.fsync(root)
        # A cache never changes, and only settings of the training leave its rows as they are.
        if not all(name.startswith(("train.", "lora.", "method.")) for name in found):
            fs.remove_tree(rounds.folder(1) / "cache")
    if begun != now:
        BEGUN.replace(root / "rounds.json", now)
    if lines:
        last = len(lines) - 1
        policy = rounds.policy(last)
        if digest_of_model(policy) != lines[last].model:
            raise CorruptionError(
                f"{policy.path} is not the model that round {last} has trained. Restore it from a "
                "copy, or choose another --output."
            )
    return lines


def _read_lines(path: Path) -> list[Finished]:
    if not path.exists():
        return []
    try:
        lines = fs.read_bytes(path).splitlines(keepends=True)
        return [from_signed_json(Finished, line) for line in lines]
    except CodecError as error:
        raise damaged(path, str(error), "Restore it from a copy.") from error


def _make_folder(path: Path) -> None:
    """Makes a folder whose name is durable before anything is in it."""
    fs.make_folder(path)
    fs.fsync(path.parent)


def _round(rounds: Rounds, number: int, progress: Progress) -> dict[str, float] | None:
    """Makes what a round lacks; None where its training ran out of time.

    Round 0 only evaluates the first model.
    """
    config, folder = rounds.config, rounds.folder(number)
    options, metrics = config.rounds, dict[str, float]()
    _make_folder(folder)
    if number:
        # Rows of the last policy's own answers.
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
        _say(judge(judging, samples, progress=progress, sampler=rounds.sampler).text(), progress)
        _say(select(changed(config, {"select.output": selected}), judged).text(), progress)
        gc.collect()  # the models that sampled and judged
        torch.cuda.empty_cache()

        # Their log-probs under the reference; what an earlier cache holds is not scored again.
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
        _say(scored.text(), progress)

        # The training begins at the last policy.
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
        gc.collect()  # an engine and its hooks refer to each other
        torch.cuda.empty_cache()
        if trained.ending != "finished":
            return None
        _say(trained.text(), progress)
        last = read_history(folder / "run" / "metrics.jsonl").learned.row(-1, named=True)
        known = {name: last[name] for name in TRAINED if last.get(name) is not None}
        metrics = {f"train/{name}": float(value) for name, value in known.items()}

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
    """Samples of a round's policy, in this process or by a server that has it."""
    # The server of the settings is the judge's.
    own = {"data.files": [str(prompts)], "server": ServerOptions()}
    config = changed(config, {"model": rounds.policy(number), **own})
    sampler = None
    with ExitStack() as stack:
        if config.rounds.serve:
            log = Path(config.sample.output).with_name("server.log")
            sampler = ServedPolicy(config, rounds.config.server, log, stack, progress)
        _say(sample(config, progress=progress, sampler=sampler).text(), progress)


def _say(text: str, progress: Progress) -> None:
    """Prints a verb's result without its hint at the next verb, which runs by itself."""
    for line in text.splitlines():
        if not line.startswith("next: "):
            progress.log(line)


# The columns of the table, each with the name and the form of its measure.
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


def _text(rounds: Rounds, lines: Sequence[Finished], known: int, stopped: str) -> str:
    """A table of the rounds, and where the last policy is."""
    rows, notes = [], []
    for line in lines if rounds.held_out else ():
        found = {name.removeprefix("held_out/"): of for name, of in line.metrics.items()}
        cells = {
            name: format(found[measure], form) if measure in found else "-"
            for name, (measure, form) in COLUMNS.items()
        }
        if line.round:
            low, high = (found[f"win_rate/previous/{end}"] for end in ("low", "high"))
            cells["95 %"] = f"{low:.3f}-{high:.3f}"
            if unjudged := int(found["unjudged/previous"]):
                all_of = counted(int(found["comparisons/previous"]) + unjudged, "comparisons")
                notes.append(
                    f"round {line.round}: {unjudged:,} of {all_of} with the policy before have no "
                    "verdict, and are not in its win rate"
                )
        rows.append([str(line.round), *cells.values()])
    last, before = max(len(lines) - 1, 0), max(known - 1, 0)
    said = [*grid(["round", *COLUMNS], rows), *notes] if rows else []
    said.append(f"{counted(last - before, 'rounds')} made now, {before:,} known before")
    said += [stopped] if stopped else []
    said.append(f"last policy: {rounds.policy(last).path}" if last else f"in {rounds.root}")
    return "\n".join(said)
