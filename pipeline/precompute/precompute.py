"""Stage 1 in order: read, encode, plan, score, commit, publish."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

from ...schemas.cache import Manifest, Plan
from ...schemas.config import Config
from ...schemas.errors import (
    BadDataError,
    CorruptionError,
    LockedError,
    NonFiniteError,
    StorageError,
    counted,
)
from ...schemas.rows import TIE, Reference, Scorer
from ...stages.data.columns import not_read
from ...stages.report.cache_tables import worded
from ...stages.storage.cache.cache_folder import CacheFolder, WorkFolder
from ...stages.storage.cache.cache_remote import sync
from ...stages.storage.cache.cleanup import collect, is_tidy, retire
from ...stages.storage.cache.commits import read_commits, write_rejected
from ...stages.storage.cache.manifest_file import (
    PLANS,
    build_manifest,
    load_manifest,
    write_manifest,
)
from ...stages.storage.disk.locks import try_owner_lock
from ...stages.tracking.journaled_run import Run
from ...stages.tracking.outbox import unsent_runs
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..jobs.job import Call, Made, carry_out
from ..jobs.recorded_work import send_earlier
from ..jobs.rejected_rows import RejectedRows
from ..parts import Part
from .opening import (
    STAGE_ONE,
    CacheJob,
    candidates,
    may_have_scores,
    open_job,
    register_cache,
    require_same,
)
from .prepare import EncodeTasks, encode, make_plan
from .scoring import ScoreTasks, Tally, lines_of_first

PrecomputeResult: TypeAlias = Made[Manifest, Tally]

_HINTS = {
    "oom": "oom: score where there is more memory, or lower --max-length.",
    "no_mismatch": "no_mismatch: raise --max-length, or pass --kl-pairs 0.",
}


def precompute(
    config: Config,
    reference: Reference,
    *,
    progress: Progress,
    share: Part | None = None,
    stage: str = STAGE_ONE,
    shows_row: bool = False,
) -> PrecomputeResult:
    """Makes the cache that the config describes, or finishes what earlier runs and parts left.

    With a share it makes that part of it; beside it, other processes may make the others, and each
    prepares what all of them need if it is not there. `stage` is the command, which names the run
    in the tracking store; with `shows_row` a row is shown before any is scored, of all parts by the
    first.
    """
    is_first = not share or share.number == 1
    cache = open_job(config, reference, stage)
    job = PrecomputeJob(cache, share, stage, shows_row=shows_row and is_first)
    return carry_out(job, progress=progress)


@dataclass
class PrecomputeJob:
    """One process's work on a cache, and what has come of it."""

    cache: CacheJob
    share: Part | None
    stage: str
    shows_row: bool = False
    tally: Tally = field(default_factory=Tally)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    plan: Plan | None = None
    _has_written: bool = False  # the manifest

    noun = "cache"

    @property
    def config(self) -> Config:
        """The settings."""
        return self.cache.config

    @property
    def run_name(self) -> str:
        """The reference, the stage and the data."""
        return run_name(self.config.model.path, self.stage, data_name(self.config.data.files))

    @property
    def folder(self) -> CacheFolder:
        """The folder of the cache."""
        return self.cache.folder

    @property
    def device(self) -> str:
        """The device of the reference."""
        return self.cache.fingerprint.get("model.device", "cpu")

    def finished(self, *, is_prepared: bool) -> Manifest | None:
        """The manifest, if it is of this plan; refuses the folder of another cache."""
        if self.folder.url:
            sync(self.cache.work)
        if is_prepared:
            self.plan = _plan_in(self.cache.work)  # first: who publishes now takes it away
        found = _finished(self.cache)
        if found and not is_prepared:
            self._tidy(found)
        return found

    def _tidy(self, manifest: Manifest) -> None:
        """Finishes the work of a run that died after its manifest, unless another process does."""
        folder, tracking = self.folder, self.config.tracking
        if self.share:  # it takes no lock, and leaves what others have not sent yet
            if not is_tidy(folder, manifest):
                collect(folder, self.cache.work)
            return
        if is_tidy(folder, manifest) and not unsent_runs(folder.root):
            return
        with try_owner_lock(folder, self.stage) as is_owner:
            if is_owner:
                collect(folder, self.cache.work)
                send_earlier(folder.root, tracking)

    def make(self, call: Call[Tally]) -> Manifest | None:
        """Makes its share; the manifest, if that or others' work completes the cache."""
        job = self.cache
        if self.plan is None:
            job.work.prepare()
        try:
            with self._reference() as (reference, seconds):
                tasks = EncodeTasks.of(job)
                self.plan = self._planned(tasks, call)
                _describe(call.run, job, self.plan)
                self.tally.seconds = seconds()  # of loading; the rest of it is waited for
                self._score(self.plan, tasks, reference, call)
            manifest = self._published(self.plan, call)
        except (StorageError, CorruptionError, OSError):
            if self._has_written:  # and cannot tidy up
                raise
            # Who completes the cache removes the work, also under a process that is still at it.
            if job.folder.url:
                sync(job.work)
            is_gone = not (job.work.is_planned if self.plan else job.work.root.is_dir())
            if is_gone or job.is_published:
                manifest = _made_by_another(job)
            else:
                raise
        self._conclude(call.run, manifest)
        return manifest

    def _reference(self) -> AbstractContextManager[tuple[Reference, Callable[[], float]]]:
        """The reference, and the seconds that it has been loaded for.

        It is loaded onto a GPU while the cores of this machine prepare rows, unless an earlier
        cache may hold all scores.
        """
        job = self.cache
        is_here = job.config.scoring.executor == "inline" and self.device == "cuda"
        is_early = self.plan is None and is_here
        if is_early and not may_have_scores(candidates(job.config.cache), job.reference_key):
            return _opened_meanwhile(job.reference)
        return nullcontext((job.reference, lambda: 0.0))

    def _planned(self, tasks: EncodeTasks, call: Call[Tally]) -> Plan:
        """The plan, of an earlier run or of another process, or made now."""
        job, plan, progress = self.cache, self.plan, call.progress
        if plan is None:
            more = f" and {counted(len(job.inputs) - 1, 'files')} more" if job.inputs[1:] else ""
            progress.say(f"{job.inputs[0].path.name}{more}: read as {job.shape.told}")
            if job.shape.unread:
                progress.say(not_read(job.shape.unread))
            return make_plan(
                job, encode(job, tasks, call.executor, progress), self.run_id, progress
            )
        # Damage is seen before hours of work.
        if len(read_commits(job.work)) < _num_shards(plan):
            job.work.prepare()
            encoded = encode(job, tasks, call.executor, progress)
            if encoded.shards(job.config.cache.shards) != plan.shards:
                raise CorruptionError(
                    f"{job.folder.shown(job.work.root)}: its rows, prepared again, differ from its "
                    "plan. Delete it and run again; all rows that no other cache holds are then "
                    "scored again."
                )
        return plan

    def _score(
        self, plan: Plan, encoding: EncodeTasks, reference: Reference, call: Call[Tally]
    ) -> None:
        tasks = ScoreTasks.of(self.cache, plan, encoding, reference, self.run_id)
        if self.shows_row and not all(map(tasks.is_committed, range(len(tasks.sizes)))):
            for line in lines_of_first(tasks, self.cache):
                call.progress.say(line.plain)
        call.work(tasks)

    def _published(self, plan: Plan, call: Call[Tally]) -> Manifest | None:
        """Writes the manifest and removes the work, if every shard has its commit."""
        job = self.cache
        if job.folder.url:
            sync(job.work)
        commits = read_commits(job.work)
        if job.folder.manifest.exists():
            return _made_by_another(job)
        if len(commits) < _num_shards(plan):
            return None if job.work.is_planned else _made_by_another(job)
        rejected = [*plan.rejected, *(row for one in commits.values() for row in one.rejected)]
        places = {entry.identity: place for place, entry in enumerate(plan.inputs)}
        rejected.sort(key=lambda row: (places[row.file], row.row))
        names = {entry.identity: entry.name for entry in plan.inputs}
        listed = write_rejected(job.work, self.run_id, rejected, names)
        manifest = build_manifest(plan, commits, listed)
        _require_usable(job, manifest)
        if not write_manifest(job.folder, manifest):
            return _made_by_another(job)
        self._has_written = True
        call.has_published = collect(job.folder, job.work)
        register_cache(job.folder)
        return manifest

    def _conclude(self, run: Run, manifest: Manifest | None) -> None:
        run.log_metrics(self.tally.metrics(), step=self.tally.step)
        if manifest is None:
            return
        run.log_metrics({f"dropped/{reason}": n for reason, n in manifest.quarantined.items()})
        run.set_tags({"align.cache_root": manifest.root, "align.cache": str(self.folder)})
        run.log_artifact(self.folder.manifest)

    def lines(self, made: Manifest, *, was_complete: bool) -> list[str]:
        """The size of the cache, the scoring done for it, and the dropped rows."""
        lines = [
            f"{self.folder}: {counted(made.rows, 'rows')}, {made.branches:,} branches, "
            f"{made.tokens:,} completion tokens in {counted(len(made.shards), 'shards')}",
            f"cache root {made.root}",
            "already complete: nothing was scored" if was_complete else self.tally.text(),
        ]
        faults = {reason: count for reason, count in made.quarantined.items() if reason != TIE}
        if faults:
            total, each = sum(faults.values()), (f"{n} {reason}" for reason, n in faults.items())
            lines.append(f"{total} of {made.rows_in:,} rows dropped: {', '.join(each)}")
        if ties := made.quarantined.get(TIE):
            lines.append(f"{ties:,} of {made.rows_in:,} rows left out: ties have no chosen answer")
        notes = sorted(made.notes.items())
        lines += [f"note: {counted(count, worded(name))}" for name, count in notes]
        return lines + self._following()

    def _following(self) -> list[str]:
        """The command that trains on the cache, by the method of the settings or a usual one."""
        usual = "kto" if self.config.cache.kl_pairs else "dpo"
        method = self.config.train.method or usual
        return [f"next: align train --method {method} --cache {self.folder}"]


@dataclass(frozen=True)
class _OpenedEarly:
    """A reference that is being opened in a thread."""

    reference: Reference
    scorer: Future[Scorer]

    def identity(self) -> Mapping[str, str]:
        """The identity of the reference."""
        return self.reference.identity()

    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.reference.hidden_size()

    def open(self) -> Scorer:
        """Waits for it; its error is raised here."""
        return self.scorer.result()


# One at a time, also of runs of one process; its end waits, as no thread is ended inside of torch.
_LOADING = ThreadPoolExecutor(1, "align-load")


@contextmanager
def _opened_meanwhile(
    reference: Reference,
) -> Iterator[tuple[Reference, Callable[[], float]]]:
    """The reference, which is being opened from now on, and the seconds that has taken so far.

    Who leaves the block does not wait for it.
    """
    # Here, because only a reference that computes by torch needs it imported.
    import torch  # noqa: PLC0415

    # A new thread begins on the first GPU, whichever this one has chosen.
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    began, seconds = time.perf_counter(), list[float]()

    def opened() -> Scorer:
        if device is not None:
            torch.cuda.set_device(device)
        scorer = reference.open()
        seconds.append(time.perf_counter() - began)
        return scorer

    opening = _LOADING.submit(opened)
    try:
        yield (
            _OpenedEarly(reference, opening),
            lambda: seconds[0] if seconds else time.perf_counter() - began,
        )
    finally:
        opening.cancel()


def _finished(job: CacheJob) -> Manifest | None:
    """The manifest, if it is of this plan; refuses the folder of another cache."""
    folder = job.folder
    if folder.manifest.exists():
        manifest = load_manifest(folder)
        require_same(manifest.fingerprint, job.fingerprint, where=str(folder))
        return manifest
    for plan in filter(None, map(_plan_in, folder.works())):
        where = f"The unfinished run in {folder}"
        require_same(plan.fingerprint, job.fingerprint, where=where, reuse=str(folder))
    return None


def _num_shards(plan: Plan) -> int:
    return sum(map(bool, plan.shards))


def _plan_in(work: WorkFolder) -> Plan | None:
    """The plan of unfinished work, unless another process completes it just now."""
    try:
        return PLANS.find(work.plan)
    except StorageError:
        if work.plan.exists():
            raise
        return None


def _made_by_another(job: CacheJob) -> Manifest:
    """The manifest that another process published meanwhile; refuses if there is none."""
    if job.is_published:
        manifest = load_manifest(job.folder)
        if not is_tidy(job.folder, manifest):
            collect(job.folder, job.work)
        return manifest
    retire(job.work)  # what came late
    raise LockedError(
        f"{job.folder}: another run, with other settings, has completed its cache here. "
        "Choose another --output: scores that both need are copied."
    )


def _describe(run: Run, job: CacheJob, plan: Plan) -> None:
    run.log_params(job.fingerprint)
    run.set_tags({"align.plan_key": plan.plan_key, "align.reference_key": plan.reference_key})
    names = [entry.name for entry in plan.inputs]
    sentence = (
        f"Log-probs of {quoted(model_name(plan.model))} for {counted(plan.rows_in, 'rows')} of "
        f"{quoted(data_name(names))}."
    )
    config = job.config
    places = {"cache": job.folder, "reference": plan.model, "adapter": plan.adapter}
    chosen = {
        "data": ", ".join(config.data.files),
        "tokens.max_length": config.tokens.max_length,
        "cache.kl_pairs": config.cache.kl_pairs,
    }
    run.describe(description(sentence, {**places, **chosen}))
    run.log_files(plan.inputs, context="reference")


def _require_usable(job: CacheJob, manifest: Manifest) -> None:
    """Refuses to publish when scoring lost more rows than the user allows, or left none."""
    rejected = RejectedRows(
        counts=manifest.quarantined,
        rows_in=manifest.rows_in,
        rows_left=manifest.rows,
        allowed=job.config.data.max_bad_frac,
    )
    if not rejected.exceed_limit:
        return
    what = (
        f"{rejected} and {manifest.rows} rows would be left. They are listed in "
        f"{job.folder.shown(job.folder.rejected)}."
    )
    again = (
        f"To score again, delete {job.folder.shown(job.work.root)} first: it keeps what was scored."
    )
    is_float16 = job.fingerprint.get("model.dtype") == "float16"
    remedy = "try --dtype bfloat16, and check the weights" if is_float16 else "check the weights"
    not_finite = f"nonfinite_logp: the reference's log-prob is not finite; {remedy}."
    if {reason for shard in manifest.shards for reason in shard.quarantined} == {"nonfinite_logp"}:
        raise NonFiniteError(f"{what}\n{not_finite} {again}")
    reasons = [reason for reason, _ in Counter(manifest.quarantined).most_common()]
    known = {**_HINTS, "nonfinite_logp": not_finite}
    hints = [known[reason] for reason in reasons if reason in known]
    more = ["Or allow more with --max-bad-frac."] if manifest.rows else []
    raise BadDataError("\n".join([what, *hints, *more, again]))
