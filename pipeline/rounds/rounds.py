"""Goes through rounds: sample from the last policy, judge, select, score, train, evaluate."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ...schemas.cache import Manifest
from ...schemas.errors import Interrupted, counted
from ...schemas.round_record import ROUND_FORMAT, RoundRecord
from ...schemas.table_manifest import TableManifest
from ...stages.model.reference import HfReference
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.run.rounds_folder import ROUNDS, OneRound
from ...stages.storage.tables import TableFolder
from ...stages.tracking.journaled_run import Run, recorded, tagged
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_record import ROUND_TAG, ROUNDS_TAG
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..options.settings import Settings, without_secrets
from ..precompute.precompute import precompute
from ..tables.judge import judge
from ..tables.sample import sample
from ..tables.select_rows import select
from ..train.setup import check
from ..train.train import train
from .round_prompts import write_prompts
from .rounds_checks import open_rounds
from .rounds_evaluation import evaluate, stop_reason
from .rounds_plan import RoundsJob, digest_of_model
from .rounds_result import RoundsResult, metrics_of, trained_metrics


def run_rounds(settings: Settings, *, progress: Progress) -> RoundsResult:
    """Goes through all rounds that are not finished; a finished one is compared and kept."""
    job = open_rounds(settings)
    job.folder.prepare()
    with owner_lock(job.folder.root, uuid.uuid4().hex[:12]), _resuming():
        finished = _checked(job)
        reason = _stopped(job, finished)
        if reason or len(finished) >= job.config.rounds.count:
            return RoundsResult(job.folder.root, tuple(finished), reason)
        write_prompts(job.folder.prompts, job.split.train)
        write_prompts(job.folder.held_out_prompts, job.split.held_out)
        name = run_name(job.first.path, "rounds", data_name(job.config.data.files))
        with recorded(job.config.tracking, job.folder.root, "rounds", name=name) as parent:
            _describe(parent, job)
            for record in finished:
                _record(parent, job, record)
            return _go_on(job, finished, parent, progress)


def _checked(job: RoundsJob) -> list[RoundRecord]:
    """The finished rounds; refuses any that was made from something else, or lost its model."""
    finished = job.folder.finished()
    for earlier, record in zip([None, *finished], finished, strict=False):
        job.require_same(record, earlier)
    if finished:
        job.require_policy(finished[-1])
    return finished


def _stopped(job: RoundsJob, finished: Sequence[RoundRecord]) -> str:
    reasons = (stop_reason(record, job.config.rounds) for record in finished)
    return next(filter(None, reasons), "")


@contextmanager
def _resuming() -> Iterator[None]:
    """Names the way on of rounds: the training in it would name its own."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, at=stop.at) from None


def _go_on(
    job: RoundsJob, known: Sequence[RoundRecord], parent: Run, progress: Progress
) -> RoundsResult:
    finished = [*known]
    while len(finished) < job.config.rounds.count and not _stopped(job, finished):
        number = len(finished) + 1
        progress.say(f"round {number} of {job.config.rounds.count}")
        with tagged({**_group(job), ROUND_TAG: str(number)}, parent):
            record = _round(job, number, finished[-1] if finished else None, progress)
        if record is None:
            new = len(finished) - len(known)
            reason = (
                f"the training of round {number} was stopped by train.max_time; "
                "the same command continues"
            )
            return RoundsResult(job.folder.root, tuple(finished), reason, new)
        finished.append(record)
        _record(parent, job, record)
    reason = _stopped(job, finished)
    return RoundsResult(job.folder.root, tuple(finished), reason, len(finished) - len(known))


def _round(
    job: RoundsJob, number: int, earlier: RoundRecord | None, progress: Progress
) -> RoundRecord | None:
    """Makes what a round lacks; None where its training ran out of time."""
    one = job.folder.prepare_round(number)
    if job.config.rounds.prompts_per_round:
        write_prompts(one.prompts, job.prompts(number))
    tables = _selected(job, one, progress)
    cache = _scored(job, one, progress)
    trained = train(check(job.training(one)), progress=progress)
    release_memory()
    if trained.ending != "finished":
        return None
    _say(trained.text(), progress)
    with tagged({"align.prompts": "held out"}):
        held_out = evaluate(job, one, progress=progress)
    roots = {name: table.root for name, table in tables.items()}
    model = digest_of_model(job.policy(number))
    record = RoundRecord(
        format_version=ROUND_FORMAT,
        number=number,
        made_from=job.made_from(number, earlier),
        settings=job.bound_settings(),
        made={**roots, "cache": cache.root, "model": model},
        counts={**_counts(tables, cache), "train.steps": trained.steps},
        trained=trained_metrics(job.recipe, one.run),
        held_out=held_out,
    )
    return ROUNDS.put(one.record, record)


def _scored(job: RoundsJob, one: OneRound, progress: Progress) -> Manifest:
    """The cache of a round; its reference is not held while the policy trains."""
    scoring = job.scoring(one)
    made = precompute(scoring, HfReference(scoring.model, own_digests()), progress=progress)
    _say(made.text(), progress)
    assert made.manifest, "a verb without a part makes the whole cache"
    return made.manifest


def _selected(job: RoundsJob, one: OneRound, progress: Progress) -> dict[str, TableManifest]:
    """Samples, judged samples and selected rows."""
    sampling = job.sampling(job.policy(one.number - 1), job.prompt_file(one), one.samples)
    tables = {"samples": _said(sample(sampling, progress=progress), progress)}
    judged = judge(
        job.judging(one.judged), str(one.samples), progress=progress, sampler=job.judge_sampler
    )
    tables["judged"] = _said(judged, progress)
    tables["selected"] = _rows(job, one, progress)
    release_memory()
    return tables


def _rows(job: RoundsJob, one: OneRound, progress: Progress) -> TableManifest:
    """Selects rows; they are recorded here, because the command alone waits for no tracker."""
    known = TableFolder(one.selected, "selected").file.is_file()
    made = _said(select(job.selecting(one), str(one.judged)), progress)
    if not known:
        with recorded(job.config.tracking, one.selected, "select") as run:
            run.set_tags({"align.selected_root": made.root, "align.selected": str(one.selected)})
            run.log_metrics({f"select/{name}": float(n) for name, n in made.counts.items()})
    return made


def release_memory() -> None:
    """Frees what a finished verb held: an engine and its hooks refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Made(Protocol):
    """The result of a verb that makes a table."""

    @property
    def manifest(self) -> TableManifest | None:
        """The table, once it is whole."""
        ...

    def text(self) -> str:
        """A summary of a few lines."""
        ...


def _said(made: _Made, progress: Progress) -> TableManifest:
    _say(made.text(), progress)
    assert made.manifest, "a verb without a part makes the whole table"
    return made.manifest


def _say(text: str, progress: Progress) -> None:
    """Prints a verb's result without its hint at the next verb, which runs by itself."""
    for line in text.splitlines():
        if not line.startswith("next: "):
            progress.say(line)


def _counts(tables: Mapping[str, TableManifest], cache: Manifest) -> dict[str, int]:
    counts = {"cache.rows": cache.rows, "cache.branches": cache.branches}
    for name, table in tables.items():
        counts |= {f"{name}.rows": table.rows}
        counts |= {f"{name}.{what}": count for what, count in table.counts.items()}
    return counts


def _group(job: RoundsJob) -> dict[str, str]:
    return {ROUNDS_TAG: str(job.folder.root.resolve())}


def _describe(parent: Run, job: RoundsJob) -> None:
    parent.set_tags(_group(job))
    parent.log_params(without_secrets(job.bound_settings()))
    sentence = (
        f"{counted(job.config.rounds.count, 'rounds')} of {quoted(job.recipe.name)}, begun with "
        f"{quoted(model_name(job.first.path))}: sampled, judged and trained on its own answers."
    )
    places = {
        "rounds": job.folder.root.resolve(),
        "model": job.first.path,
        "prompts": ", ".join(job.config.data.files),
    }
    parent.describe(description(sentence, places))
    for name, path in (("train", job.folder.prompts), ("held-out", job.folder.held_out_prompts)):
        source = str(path.resolve())
        parent.log_dataset(
            f"{name} prompts", digest=fs.sha256_of(path), source=source, context=name
        )


def _record(parent: Run, job: RoundsJob, record: RoundRecord) -> None:
    name = job.folder.round(record.number).root.name
    lineage = {**record.made_from, **record.made}
    parent.set_tags({f"align.{name}.{what}": of for what, of in lineage.items()})
    parent.log_metrics(metrics_of(record), step=record.number)
