"""Stage 1 in order: read, encode, plan, score, commit, publish."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
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
from ...stages.data.preview import lines_of
from ...stages.report.cache_tables import worded
from ...stages.storage.cache.cache_folder import WorkFolder
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
from ...stages.tracking.progress import NoProgress, Progress
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..jobs.rejected_rows import RejectedRows
from ..parts import WHOLE, Part
from ..ray_actors import RayCluster
from ..work import Made, send_earlier, working
from .opening import (
    STAGE_ONE,
    CacheJob,
    candidates,
    may_have_scores,
    open_job,
    register_cache,
    require_same,
)
from .prepare import Slices, encode, make_plan
from .scoring import Shards, ShardScorer, Tally

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
    part: Part | None = None,
    stage: str = STAGE_ONE,
    shows_row: bool = False,
) -> PrecomputeResult:
    """Makes the cache that the config describes, or finishes what earlier runs and parts left.

    A part makes its own shards; beside it, other processes may make the others, and each encodes
    what all of them need if it is not there. `stage` is the command, which names the run in the
    tracking store; with `shows_row` a row is shown before any is scored, of all parts by the first.
    """
    job, tally = open_job(config, reference, stage), Tally()
    where = job.folder.url or job.folder.root
    _sync(job)
    if found := _finished(job):
        _tidy(job, found, part, stage)
        return Made(where, found, tally, _lines(job, found), part, was_complete=True)

    name = run_name(config.model.path, stage, data_name(config.data.files))
    with working(job.folder, stage, config.tracking, part, name=name, kept=tally.text) as run:
        _sync(job)
        plan = _plan_in(job.work)  # first: who publishes now takes it away
        if found := _finished(job):
            return Made(where, found, tally, _lines(job, found), part, was_complete=True)
        if plan is None:
            job.work.prepare()
        try:
            with _opening(job, is_planned=plan is not None) as (opened, seconds):
                slices = Slices.of(job)
                plan = _planned(job, plan, slices, part, progress)
                _describe(run, job, plan)
                shards = Shards.of(job, plan, slices, opened)
                if shows_row and (part or WHOLE).number == 1:
                    _show_row(job, shards, progress)
                began = time.perf_counter() - seconds()  # of loading; the rest of it is waited for
                for done in _scored(job, shards, part, progress):
                    tally.add(done)
                    tally.seconds = time.perf_counter() - began
                    run.log_metrics(tally.metrics(), step=tally.units)
                tally.seconds = time.perf_counter() - began
            manifest, has_published = _published(job, plan)
        except (StorageError, CorruptionError, OSError):
            # Who completes the cache removes the work, also under a process that is still at it.
            _sync(job)
            is_gone = not (job.work.is_planned if plan else job.work.root.is_dir())
            if not (is_gone or job.is_published):
                raise
            manifest, has_published = _made_by_another(job), False
        run.log_metrics(tally.metrics(), step=tally.units)
        if manifest:
            run.log_metrics({f"dropped/{why}": n for why, n in manifest.quarantined.items()})
            cache = {"align.cache_root": manifest.root, "align.cache": str(job.folder)}
            run.set_tags(cache)
            run.log_artifact(job.folder.manifest)
    lines = _lines(job, manifest, tally)
    return Made(where, manifest, tally, lines, part, has_published=has_published)


def _opening(
    job: CacheJob, *, is_planned: bool
) -> AbstractContextManager[tuple[Reference, Callable[[], float]]]:
    """The reference, and the seconds that it has been loaded for.

    It is loaded onto a GPU while the cores of this machine encode rows, unless an earlier cache
    may hold all scores.
    """
    is_early = not is_planned and job.config.scoring.executor == "inline" and job.device == "cuda"
    if is_early and not may_have_scores(candidates(job.config.cache), job.reference_key):
        return _opened_meanwhile(job.reference)
    return nullcontext((job.reference, lambda: 0.0))


def _planned(
    job: CacheJob, plan: Plan | None, slices: Slices, part: Part | None, progress: Progress
) -> Plan:
    """The plan, of an earlier run or of another process, or made now; its rows are encoded."""
    if plan is None:
        more = f" and {counted(len(job.inputs) - 1, 'files')} more" if job.inputs[1:] else ""
        progress.say(f"{job.inputs[0].path.name}{more}: read as {job.shape.told}")
        if job.shape.unread:
            progress.say(not_read(job.shape.unread))
        return make_plan(job, encode(slices, job.config, part, progress=progress), progress)
    # Damage is seen before hours of work.
    if len(read_commits(job.work)) < plan.num_shards:
        job.work.prepare()
        encoded = encode(slices, job.config, part, progress=progress)
        if encoded.shards(job.config.cache.shards) != plan.shards:
            raise CorruptionError(
                f"{job.folder.shown(job.work.root)}: its rows, prepared again, differ from its "
                "plan. Delete it and run again; all rows that no other cache holds are then "
                "scored again."
            )
    return plan


def _show_row(job: CacheJob, shards: Shards, progress: Progress) -> None:
    """Shows the model's input for the first row that has all of its completions.

    It is text of the data: for who runs the command, and for no record of it.
    """
    numbers = [number for number, rows in enumerate(shards.plan.shards) if rows]
    if all(map(shards.is_done, numbers)):
        return
    rows = shards.build(shards.encoded_rows(), numbers[0]).rows
    if len(rows):
        file = job.paths[int(rows.file[0])].name
        side = job.config.tokens.prompt_side
        for line in lines_of(rows.between(0, 1), job.tokenizer, file=file, prompt_side=side):
            progress.say(line.plain)


def _scored(
    job: CacheJob, shards: Shards, part: Part | None, progress: Progress
) -> Iterator[Tally]:
    """Scores the shards of this part, the largest first; gives the counts of each."""
    rows, scoring = shards.plan.shards, job.config.scoring
    own = (part or WHOLE).of(rows)
    progress.begin("scoring", total=sum(rows[shard] for shard in own), unit="rows")

    def missing() -> Iterator[int]:
        for shard in own:
            if shards.is_done(shard):
                progress.advance(rows[shard])
            else:
                yield shard

    if scoring.executor == "ray":
        cluster = RayCluster.of(scoring, on_gpu=job.device == "cuda")
        made = cluster.run(ShardScorer(shards, NoProgress()), [*missing()], "shard")
        with closing(made):
            for shard, done in made:
                progress.advance(rows[shard])
                if done:
                    yield done
    else:
        with closing(ShardScorer(shards, progress).score_each(missing())) as made_here:
            yield from made_here
    progress.end()


def _published(job: CacheJob, plan: Plan) -> tuple[Manifest | None, bool]:
    """The manifest, if every shard has its commit, and whether this process has written it."""
    _sync(job)
    commits = read_commits(job.work)
    if job.folder.manifest.exists():
        return _made_by_another(job), False
    if len(commits) < plan.num_shards:
        return (None if job.work.is_planned else _made_by_another(job)), False
    rejected = [*plan.rejected, *(row for one in commits.values() for row in one.rejected)]
    places = {entry.identity: place for place, entry in enumerate(plan.inputs)}
    rejected.sort(key=lambda row: (places[row.file], row.row))
    names = {entry.identity: entry.name for entry in plan.inputs}
    listed = write_rejected(job.work, job.run_id, rejected, names)
    manifest = build_manifest(plan, commits, listed)
    _require_usable(job, manifest)
    if not write_manifest(job.folder, manifest):
        return _made_by_another(job), False
    has_published = collect(job.folder, job.work)
    register_cache(job.folder)
    return manifest, has_published


def _lines(job: CacheJob, made: Manifest | None, tally: Tally | None = None) -> tuple[str, ...]:
    """The size of the cache, the scoring done for it, if any, and the dropped rows."""
    if made is None:
        return ()
    root, config = job.folder, job.config
    lines = [
        f"{root}: {counted(made.rows, 'rows')}, {made.branches:,} branches, "
        f"{made.tokens:,} completion tokens in {counted(len(made.shards), 'shards')}",
        f"cache root {made.root}",
        tally.text() if tally else "already complete: nothing was scored",
    ]
    faults = {reason: count for reason, count in made.quarantined.items() if reason != TIE}
    if faults:
        total, each = sum(faults.values()), (f"{n} {reason}" for reason, n in faults.items())
        lines.append(f"{total} of {made.rows_in:,} rows dropped: {', '.join(each)}")
    if ties := made.quarantined.get(TIE):
        lines.append(f"{ties:,} of {made.rows_in:,} rows left out: ties have no chosen answer")
    lines += [f"note: {counted(count, worded(name))}" for name, count in sorted(made.notes.items())]
    # The command that trains on it, by the method of the settings or a usual one.
    method = config.train.method or ("kto" if config.cache.kl_pairs else "dpo")
    return (*lines, f"next: align train --method {method} --cache {root}")


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


def _sync(job: CacheJob) -> None:
    """Reads what other processes have shared through the bucket, if the cache is in one."""
    if job.folder.url:
        sync(job.work)


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


def _tidy(job: CacheJob, manifest: Manifest, part: Part | None, stage: str) -> None:
    """Finishes the work of a run that died after its manifest, unless another process does."""
    folder = job.folder
    if part:  # it takes no lock, and leaves what others have not sent yet
        if not is_tidy(folder, manifest):
            collect(folder, job.work)
        return
    if is_tidy(folder, manifest) and not unsent_runs(folder.root):
        return
    with try_owner_lock(folder, stage) as is_owner:
        if is_owner:
            collect(folder, job.work)
            send_earlier(folder.root, job.config.tracking)


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
