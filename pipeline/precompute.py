"""Stage 1 in order: read, encode, put on the ring, plan, score, commit, publish."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

from ..schemas.cache import Manifest, Plan
from ..schemas.config import Config
from ..schemas.errors import BadDataError, NonFiniteError, StorageError, counted
from ..schemas.rows import Reference
from ..stages.report.cache_tables import worded
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.cleanup import collect, is_tidy, superseded
from ..stages.storage.commits import read_commits
from ..stages.storage.locks import OwnerLock, owner_lock, try_owner_lock
from ..stages.storage.manifest_file import build_manifest, load_manifest, load_plan, write_manifest
from ..stages.storage.objects import Location
from ..stages.tracking.journaled_run import Run, recorded
from ..stages.tracking.outbox import unsent_runs
from ..stages.tracking.progress import Progress
from .cache_compatibility import register_cache, require_same_or_growing
from .mlflow_sync import send_earlier
from .precompute_plan import Job, RejectedRows, make_plan, open_job, remake_ring, ring_of
from .scoring_worker import Tally, Worker, score_units

POLL_SECONDS = 0.1
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
    worker: Worker,
    stage: str = "precompute-ref",
) -> PrecomputeResult:
    """Makes the cache that the config describes, or finishes what an earlier run left.

    `stage` names the run in the tracking store.
    """
    job = open_job(config, reference)
    run_id = uuid.uuid4().hex[:12]
    if finished := _finished(job):
        _tidy(job, finished, run_id)
        return PrecomputeResult(job.folder.root, finished, Tally(), was_complete=True)
    job.folder.prepare()
    with _place(job, run_id, progress, joins=worker.joins) or nullcontext() as lock:
        plan = load_plan(job.work)  # first: an owner who finishes now takes its plan away
        if finished := _finished(job):
            return PrecomputeResult(job.folder.root, finished, Tally(), was_complete=True)
        home, options = job.folder.local, config.tracking
        before = send_earlier(home, options) if lock else ""
        with recorded(options, home, stage, is_recorded=bool(lock), goes_on_from=before) as run:
            if lock or not plan:
                plan = _planned(job, plan, run_id, progress)
            _describe(run, job, plan)
            tally = score_units(job, plan, worker, run_id=run_id, progress=progress, run=run)
            manifest = _publish(job, plan, run_id, is_owner=bool(lock))
            _conclude(run, job, manifest, tally)
    return PrecomputeResult(job.folder.root, manifest, tally, was_complete=False)


def _finished(job: Job) -> Manifest | None:
    """The manifest, if it is of this plan; refuses the folder of another cache."""
    folder = job.folder
    if folder.manifest.exists():
        manifest = load_manifest(folder)
        if manifest.plan_key == job.plan_key:
            return manifest
        require_same_or_growing(manifest.fingerprint, job.fingerprint, where=str(folder.root))
    for plan in filter(None, map(load_plan, folder.works())):
        where = f"The unfinished run in {folder.root}"
        require_same_or_growing(plan.fingerprint, job.fingerprint, where=where)
    return None


def _tidy(job: Job, manifest: Manifest, run_id: str) -> None:
    """Finishes the work of a run that died after its manifest, unless another process does."""
    if is_tidy(job.folder, manifest) and not unsent_runs(job.folder.local):
        return
    if lock := try_owner_lock(job.folder, run_id):
        with lock:
            collect(job.folder, manifest)
            send_earlier(job.folder.local, job.config.tracking)


def _place(job: Job, run_id: str, progress: Progress, *, joins: bool) -> OwnerLock | None:
    """Becomes the owner of the folder, or joins an owner whose plan is ready."""
    if not joins:
        return owner_lock(job.folder, run_id)
    is_said = False
    while True:
        lock = try_owner_lock(job.folder, run_id)
        is_ready = job.work.plan.exists() and ring_of(job).is_whole
        if lock or is_ready or job.is_published:
            return lock
        if not is_said:
            progress.say(f"another process prepares the rows of {job.folder.root}")
            is_said = True
        time.sleep(POLL_SECONDS)


def _planned(job: Job, plan: Plan | None, run_id: str, progress: Progress) -> Plan:
    """The owner's plan, of an earlier run or made now."""
    if plan is None:
        return make_plan(job, run_id, progress)
    # Damage is reported before hours of work.
    read_commits(job.work, len(plan.unit_offsets) - 1)
    if not ring_of(job).is_whole:
        remake_ring(job, plan, progress)
    return plan


def _describe(run: Run, job: Job, plan: Plan) -> None:
    run.log_params(job.fingerprint)
    run.set_tags({"align.plan_key": plan.plan_key, "align.reference_key": plan.reference_key})
    for entry in plan.inputs:
        run.log_dataset(entry.name, digest=entry.sha256, source=entry.name, context="reference")


def _publish(job: Job, plan: Plan, run_id: str, *, is_owner: bool) -> Manifest:
    """Writes the manifest and tidies up; a worker that joined leaves that to a living owner."""
    while not is_owner:
        if finished := _finished(job):
            return finished
        if lock := try_owner_lock(job.folder, run_id):
            with lock:
                send_earlier(job.folder.local, job.config.tracking)
                return _publish(job, plan, run_id, is_owner=True)
        time.sleep(POLL_SECONDS)
    manifest = _whole(job, plan)
    write_manifest(job.folder, manifest)
    collect(job.folder, manifest)
    register_cache(job.folder)
    return manifest


def _whole(job: Job, plan: Plan) -> Manifest:
    """The manifest of all commits, or the one of another machine, which then removes them."""
    commits, failure = {}, None
    try:
        commits = read_commits(job.work, len(plan.unit_offsets) - 1)
    except StorageError as error:
        failure = error
    if finished := _finished(job):
        return finished
    if failure:
        raise failure
    manifest = build_manifest(plan, commits)
    _require_usable(job, manifest)
    return manifest


def _require_usable(job: Job, manifest: Manifest) -> None:
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


def _conclude(run: Run, job: Job, manifest: Manifest, tally: Tally) -> None:
    run.log_metrics(tally.metrics(), step=tally.units)
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
            lines.append(
                f"scored {tally.scored:,} branches, reused {tally.reused:,} of "
                f"{tally.scored + tally.reused:,}, in {tally.seconds:.1f} s"
            )
        dropped = [f"{count} {reason}" for reason, count in manifest.quarantined.items()]
        if dropped:
            total = sum(manifest.quarantined.values())
            lines.append(f"{total} of {manifest.rows_in:,} rows dropped: {', '.join(dropped)}")
        if kept := superseded(CacheFolder(self.folder), manifest):
            lines.append(f"note: {kept}")
        notes = sorted(manifest.notes.items())
        lines += [f"note: {counted(count, worded(name))}" for name, count in notes]
        return "\n".join(lines)
