"""Stage 1 in order: read, encode, put on the ring, plan, score, commit, publish."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from ..schemas.cache import Manifest, Plan
from ..schemas.config import Config
from ..schemas.errors import (
    BadDataError,
    CorruptionError,
    LockedError,
    NonFiniteError,
    StorageError,
    counted,
)
from ..schemas.rows import Reference
from ..stages.data.unread_columns import not_read
from ..stages.report.cache_tables import worded
from ..stages.storage import objects
from ..stages.storage.cache_folder import CacheFolder, WorkFolder
from ..stages.storage.cleanup import collect, is_tidy, superseded
from ..stages.storage.commits import read_commits
from ..stages.storage.locks import owner_lock, try_owner_lock
from ..stages.storage.manifest_file import build_manifest, load_manifest, load_plan, write_manifest
from ..stages.storage.objects import Location, ObjectPath
from ..stages.tracking.journaled_run import Run
from ..stages.tracking.outbox import unsent_runs
from ..stages.tracking.progress import Progress
from .cache_compatibility import register_cache, require_same_or_growing
from .executors.executor import Executor, Share
from .executors.kinds import executor_of
from .mlflow_sync import recorded_work, send_earlier
from .precompute_plan import STAGE_ONE, CacheJob, make_plan, open_job, remake_ring, ring_of
from .rejected_rows import RejectedRows
from .scoring_worker import ScoreTasks, Tally, lines_of_first

_HINTS = {
    "oom": "oom: score where there is more memory, or lower --max-length.",
    "nonfinite_logp": "nonfinite_logp: try --dtype float32, and check the weights.",
    "no_mismatch": "no_mismatch: raise --max-length, or pass --kl-pairs 0.",
}


def precompute(
    config: Config,
    reference: Reference,
    *,
    progress: Progress,
    stage: str = STAGE_ONE,
    shows_row: bool = False,
) -> PrecomputeResult:
    """Makes the cache that the config describes, or finishes what earlier runs and parts left.

    `stage` is the command, which names the run in the tracking store; `shows_row` shows a row
    before any is scored.
    """
    job = open_job(config, reference, stage)
    run_id = _new_id()
    if finished := _finished(job):
        _tidy(job, finished, run_id)
        return _result(job, finished)
    job.folder.prepare()
    local, tracking = job.folder.local, config.tracking
    with owner_lock(job.folder, run_id):
        plan = _plan_in(job.work)  # first: who publishes now takes it away
        if finished := _finished(job):
            return _result(job, finished)
        executor = executor_of(config.scoring, None, job.fingerprint.get("model.device", "cpu"))
        call = _Call(job, run_id, executor, progress, shows_row=shows_row)
        with recorded_work(tracking, local, stage) as run:
            manifest = call.finish(run, plan)
    assert manifest, "an executor without a part leaves no unit"
    return _result(job, manifest, call.tally)


def precompute_part(
    config: Config,
    reference: Reference,
    share: Share,
    *,
    progress: Progress,
    stage: str = STAGE_ONE,
    shows_row: bool = False,
) -> PartResult:
    """Makes one part of the cache; beside it, other processes may make the others.

    It takes no lock on the cache. What all parts need, it prepares itself if it is not there. Of
    all parts the first shows a row.
    """
    executor = executor_of(config.scoring, share, "cpu")  # this process
    job = open_job(config, reference, stage)
    home = job.folder.root
    plan = _plan_in(job.work)  # first, as above
    if finished := _finished(job):
        if not is_tidy(job.folder, finished):
            collect(job.folder, [job.work])
        return PartResult(share, home, Tally(), whole=_result(job, finished))
    job.folder.prepare()
    is_first = share.number == 1
    call = _Call(job, _new_id(), executor, progress, shows_row=shows_row and is_first)
    local = job.folder.local
    with recorded_work(config.tracking, local, stage, is_alone=False) as run:
        run.set_tags({"align.part": str(share)})
        manifest = call.finish(run, plan)
    whole = _result(job, manifest, call.tally) if manifest else None
    return PartResult(share, home, call.tally, whole=whole, has_published=call.has_published)


def _result(job: CacheJob, manifest: Manifest, tally: Tally | None = None) -> PrecomputeResult:
    """A finished cache; without a tally it was there before."""
    root, unread = job.folder.root, job.shape.noted
    return PrecomputeResult(root, manifest, tally or Tally(), tally is None, unread)


@dataclass
class _Call:
    """One process's work on a cache, and what has come of it."""

    job: CacheJob
    run_id: str
    executor: Executor
    progress: Progress
    shows_row: bool = False
    tally: Tally = field(default_factory=Tally)
    has_published: bool = False
    _has_written: bool = False  # the manifest

    def finish(self, run: Run, plan: Plan | None) -> Manifest | None:
        """Makes the executor's share; the manifest, if that or others' work completes the cache."""
        job = self.job
        if plan is None:
            job.work.prepare()
        try:
            plan = _planned(job, plan, self.run_id, self.executor, self.progress)
            _describe(run, job, plan)
            self._score(plan, run)
            manifest = self._publish(plan)
        except (StorageError, CorruptionError, OSError):
            if self._has_written:  # and cannot tidy up
                raise
            # Who completes the cache removes the work, also under a process that is still at it.
            is_gone = not (job.work.is_planned if plan else job.work.local.is_dir())
            in_store = isinstance(job.work.root, ObjectPath)  # where it goes one by one
            if is_gone or (in_store and job.is_published):
                manifest = _made_by_another(job)
            else:
                raise
        _conclude(run, job, manifest, self.tally)
        return manifest

    def _score(self, plan: Plan, run: Run) -> None:
        started = time.perf_counter()

        def count(unit: Tally) -> None:
            self.tally.add(unit)
            self.tally.seconds = time.perf_counter() - started
            run.log_metrics(self.tally.metrics(), step=self.tally.units)

        tasks = ScoreTasks.of(self.job, plan, self.run_id)
        if self.shows_row and not all(map(tasks.is_committed, range(len(tasks.sizes)))):
            for line in lines_of_first(tasks, self.job):
                self.progress.say(line)
        self.executor.run(tasks, progress=self.progress, on_done=count)
        self.tally.seconds = time.perf_counter() - started

    def _publish(self, plan: Plan) -> Manifest | None:
        """Writes the manifest and removes the work, if every unit has its commit."""
        folder, num_units = self.job.folder, len(plan.unit_offsets) - 1
        commits = read_commits(self.job.work, num_units)
        if len(commits) < num_units:
            is_over = self.job.is_published or not self.job.work.is_planned
            return _made_by_another(self.job) if is_over else None
        manifest = build_manifest(plan, commits)
        _require_usable(self.job, manifest)
        # Unfinished work on other data, which this cache takes the place of. What begins later is
        # on top of this cache.
        others = [work for work in folder.works() if work != self.job.work]
        if not write_manifest(folder, manifest, work=self.job.work):
            return _made_by_another(self.job)
        self._has_written = True
        self.has_published = collect(folder, [self.job.work, *others])
        register_cache(folder)
        return manifest


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _finished(job: CacheJob) -> Manifest | None:
    """The manifest, if it is of this plan; refuses the folder of another cache."""
    folder = job.folder
    if folder.manifest.exists():
        manifest = load_manifest(folder)
        if manifest.plan_key == job.plan_key:
            return manifest
        require_same_or_growing(manifest.fingerprint, job.fingerprint, where=str(folder.root))
    for plan in filter(None, map(_plan_in, folder.works())):
        where = f"The unfinished run in {folder.root}"
        require_same_or_growing(plan.fingerprint, job.fingerprint, where=where)
    return None


def _plan_in(work: WorkFolder) -> Plan | None:
    """The plan of unfinished work, unless another process completes it just now."""
    try:
        return load_plan(work)
    except StorageError:
        if work.plan.exists():
            raise
        return None


def _made_by_another(job: CacheJob) -> Manifest:
    """The manifest by which another process has ended the work here; ends what is left of it."""
    if job.is_published:
        manifest = load_manifest(job.folder)
        if not is_tidy(job.folder, manifest):
            collect(job.folder, [job.work])
        return manifest
    if isinstance(job.work.root, ObjectPath):
        objects.remove_below(job.work.root)  # the commits that came late
    raise LockedError(
        f"{job.folder.root}: another run, on other data, has completed its cache here and taken "
        "the place of this one. Run the same command again: scores that both need are copied."
    )


def _tidy(job: CacheJob, manifest: Manifest, run_id: str) -> None:
    """Finishes the work of a run that died after its manifest, unless another process does."""
    if is_tidy(job.folder, manifest) and not unsent_runs(job.folder.local):
        return
    if lock := try_owner_lock(job.folder, run_id):
        with lock:
            collect(job.folder, [job.work])
            send_earlier(job.folder.local, job.config.tracking)


def _planned(
    job: CacheJob, plan: Plan | None, run_id: str, executor: Executor, progress: Progress
) -> Plan:
    """The plan, of an earlier run or of another process, or made now."""
    if plan is None:
        return make_plan(job, run_id, executor, progress)
    # Damage is reported before hours of work.
    read_commits(job.work, len(plan.unit_offsets) - 1)
    if not ring_of(job).is_whole:
        remake_ring(job, plan, executor, progress)
    return plan


def _describe(run: Run, job: CacheJob, plan: Plan) -> None:
    run.log_params(job.fingerprint)
    run.set_tags({"align.plan_key": plan.plan_key, "align.reference_key": plan.reference_key})
    for entry in plan.inputs:
        run.log_dataset(entry.name, digest=entry.sha256, source=entry.name, context="reference")


def _require_usable(job: CacheJob, manifest: Manifest) -> None:
    """Refuses to publish when scoring lost more rows than the user allows, or left none."""
    rejected = RejectedRows(
        counts=manifest.quarantined,
        rows_in=manifest.rows_in,
        rows_left=manifest.rows,
        allowed=job.config.data.max_bad_frac,
        files=manifest.quarantine,
    )
    if not rejected.exceed_limit:
        return
    what = (
        f"{rejected} and {manifest.rows} rows would be left. They are listed in "
        f"{rejected.listed(job.folder.root)}."
    )
    again = f"To score again, delete {job.work.root} first: it keeps what was scored."
    if {reason for shard in manifest.shards for reason in shard.quarantined} == {"nonfinite_logp"}:
        raise NonFiniteError(
            f"{what}\nThe reference gives NaN or infinity for them. Try --dtype float32, and "
            f"check the weights. {again}"
        )
    reasons = [reason for reason, _ in Counter(manifest.quarantined).most_common()]
    hints = [_HINTS[reason] for reason in reasons if reason in _HINTS]
    more = ["Or allow more with --max-bad-frac."] if manifest.rows else []
    raise BadDataError("\n".join([what, *hints, *more, again]))


def _conclude(run: Run, job: CacheJob, manifest: Manifest | None, tally: Tally) -> None:
    run.log_metrics(tally.metrics(), step=tally.units)
    if manifest is None:
        return
    run.log_metrics({f"dropped/{reason}": n for reason, n in manifest.quarantined.items()})
    run.set_tags({"align.cache_root": manifest.root, "align.cache": str(job.folder.root)})
    run.log_artifact(job.folder.manifest)


@dataclass(frozen=True)
class PrecomputeResult:
    """A finished cache, and what this process did for it."""

    folder: Location
    manifest: Manifest
    tally: Tally
    was_complete: bool
    unread: tuple[str, ...] = ()  # columns of the data

    def text(self) -> str:
        """A summary of a few lines."""
        manifest, tally = self.manifest, self.tally
        lines = [
            f"{self.folder}: {counted(manifest.rows, 'rows')}, {manifest.branches:,} branches, "
            f"{manifest.tokens:,} completion tokens in {counted(len(manifest.shards), 'shards')}",
            f"cache root {manifest.root}",
        ]
        if self.was_complete:
            lines.append("already complete: nothing was scored")
        else:
            lines.append(tally.text())
        dropped = [f"{count} {reason}" for reason, count in manifest.quarantined.items()]
        if dropped:
            total = sum(manifest.quarantined.values())
            lines.append(f"{total} of {manifest.rows_in:,} rows dropped: {', '.join(dropped)}")
        if kept := superseded(CacheFolder(self.folder), manifest):
            lines.append(f"note: {kept}")
        if self.unread:
            lines.append(f"note: {not_read(self.unread)}")
        notes = sorted(manifest.notes.items())
        lines += [f"note: {counted(count, worded(name))}" for name, count in notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class PartResult:
    """A part of a cache that is done, and the whole cache if no part is missing."""

    share: Share
    folder: Location
    tally: Tally
    whole: PrecomputeResult | None
    has_published: bool = False  # of the parts of a cache, one has

    def text(self) -> str:
        """A summary of a few lines; of all parts, the one that has published names the root."""
        if self.whole and (self.has_published or self.whole.was_complete):
            return self.whole.text()
        state = (
            "the cache is complete"
            if self.whole
            else "whichever part is the last completes the cache; if one does not end, the same "
            "command without --part does what is missing"
        )
        return f"part {self.share} of {self.folder} is done\n{self.tally.text()}\n{state}"
