"""Stage 1 in order: read, encode, plan, score, write shards, publish."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

from ...schemas.cache import Manifest, Plan, reference_named
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
from ...stages.methods.table import METHODS
from ...stages.report.text_tables import worded
from ...stages.storage.cache_work import unfinished_work
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.disk.locks import try_owner_lock
from ...stages.storage.locations import origin_of
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import Run
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..jobs.object_inputs import with_local_inputs
from ..jobs.rejected_rows import RejectedRows
from ..options.settings_table import as_flags
from ..parts import WHOLE, Part
from ..ray_actors import run_on_ray
from ..work import CommandResult, working
from .imported import ImportedReference
from .opening import (
    STAGE_ONE,
    CacheJob,
    candidates,
    may_have_scores,
    open_job,
    register_cache,
    require_model,
    require_same,
)
from .prepare import Slices, absolute_origin, encode, make_plan
from .scoring import ScoringCounts, Shards, ShardScorer

PrecomputeResult: TypeAlias = CommandResult[Manifest, ScoringCounts]


def make_cache(
    config: Config,
    *,
    progress: Progress,
    part: Part | None = None,
    shows_row: bool = False,
    logps: str = "",
    rescore: int = 0,
) -> PrecomputeResult:
    """Makes a cache with the config's reference; model and data may be in a bucket.

    `logps` is a table of known log-probs; `rescore` rows of it are first scored again.
    """
    from ...stages.model.reference import HfReference  # noqa: PLC0415 - it imports torch

    require_model(config, part)
    local = with_local_inputs(config)
    reference: Reference = HfReference(local.model, own_digests())
    if logps:
        local = replace(local, cache=replace(local.cache, token_logps=False, scored=True))
        reference = imported = ImportedReference(reference, logps, local.tokens.max_length)
        job = open_job(local, imported)
        if not job.is_published:
            imported.require_reproduced(job, rescore, progress)
    return precompute(local, reference, progress=progress, part=part, shows_row=shows_row)


def precompute(
    config: Config,
    reference: Reference,
    *,
    progress: Progress,
    part: Part | None = None,
    stage: str = STAGE_ONE,
    shows_row: bool = False,
) -> PrecomputeResult:
    """Makes the config's cache, or finishes the work of earlier runs and parts.

    A part makes its own shards while other processes make the others; each process encodes missing
    slices. `stage` is the command, which names the run in the tracking store. With `shows_row`, the
    first part shows a row before scoring.
    """
    job, counts = open_job(config, reference, stage), ScoringCounts()
    cache = job.cache
    where = cache.url or cache.root
    cache.sync()
    if found := _own_manifest(job):
        _tidy(job, found, part, stage)
        return CommandResult(where, found, counts, _lines(job, found), part, was_complete=True)

    name = run_name(config.model.path, stage, data_name(config.data.files))
    with working(cache, stage, config.tracking, part, name=name, kept=counts.text) as run:
        cache.sync()
        plan = cache.find_plan()  # removed after the manifest is written
        if found := _own_manifest(job):  # again, now that this process owns the folder
            return CommandResult(where, found, counts, _lines(job, found), part, was_complete=True)
        if plan is None:
            cache.prepare_work()

        opening = _Opening(job.reference) if _opens_early(job, plan) else None
        try:
            slices = Slices.of(job)
            plan = _planned(job, plan, slices, part, progress)
            _describe(run, job, plan)
            shards = Shards(plan, slices, job.reference, config)
            if shows_row and (part or WHOLE).number == 1:
                _show_row(job, shards, progress)
            began = time.perf_counter() - (opening.seconds if opening else 0.0)
            for done in _scored(job, shards, opening, part, progress):
                counts.add(done)
                counts.seconds = time.perf_counter() - began
                run.log_metrics(counts.metrics(), step=counts.shards)
            counts.seconds = time.perf_counter() - began
            manifest, has_published = _published(job, plan)
        except (StorageError, CorruptionError, OSError):
            # The process that completes the cache removes the work, even if others still run.
            cache.sync()
            is_there = cache.plan.is_file() if plan else cache.work.is_dir()
            if is_there and not job.is_published:
                raise
            manifest, has_published = _of_another_process(job), False
        finally:
            if opening:
                opening.cancel()

        run.log_metrics(counts.metrics(), step=counts.shards)
        if manifest:
            run.log_metrics({f"dropped/{why}": n for why, n in manifest.reasons.items()})
            run.set_tags({"align.cache_root": manifest.root, "align.cache": str(cache)})
            run.log_artifact(cache.manifest_file)
    lines = _lines(job, manifest, counts)
    return CommandResult(where, manifest, counts, lines, part, has_published=has_published)


def _own_manifest(job: CacheJob) -> Manifest | None:
    """The manifest of this cache, if it is finished; refuses the folder of another cache."""
    cache = job.cache

    def require_own(made: Plan | Manifest, where: str, reuse: str = "") -> None:
        given = job.config.model
        models = (
            reference_named(made.model, made.adapter),
            reference_named(absolute_origin(given.path), absolute_origin(given.adapter)),
        )
        require_same(made.fingerprint, job.fingerprint, where=where, models=models, reuse=reuse)

    if cache.manifest_file.exists():
        manifest = cache.manifest()
        require_own(manifest, str(cache))
        return manifest
    for work in unfinished_work(cache):
        if plan := work.find_plan():
            require_own(plan, f"The unfinished run in {cache}", reuse=str(cache))
    return None


def _tidy(job: CacheJob, manifest: Manifest, part: Part | None, stage: str) -> None:
    """Tidies up after a run that died after its manifest, unless another process does."""
    cache = job.cache
    if not cache.is_tidy(manifest):
        if part:  # a part takes no lock
            cache.tidy()
        else:
            with try_owner_lock(cache.root, stage) as is_owner:
                if is_owner:
                    cache.tidy()
    register_cache(cache)


def _opens_early(job: CacheJob, plan: Plan | None) -> bool:
    """Whether to load the reference onto a GPU while the CPU encodes rows.

    Not if a plan exists, so rows are encoded, or if an earlier cache may have all scores.
    """
    config = job.config
    if plan or config.scoring.executor != "inline" or job.device != "cuda":
        return False
    return config.cache.scored and not may_have_scores(candidates(config.cache), job.reference_key)


# One at a time per process; the process's end waits, as a thread inside torch cannot be stopped.
_LOADING = ThreadPoolExecutor(1, "align-load")


class _Opening:
    """A reference that is being opened in a thread."""

    def __init__(self, reference: Reference) -> None:
        # Imported here, because only some references need torch.
        import torch  # noqa: PLC0415

        # A new thread starts on the first GPU, not on this thread's.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._reference, self._began = reference, time.perf_counter()
        self._ended: float | None = None
        self._scorer = _LOADING.submit(self._open)
        self.cancel = self._scorer.cancel  # an early exit does not wait for it
        self.result = self._scorer.result

    def _open(self) -> Scorer:
        if self._device is not None:
            import torch  # noqa: PLC0415 - as above

            torch.cuda.set_device(self._device)
        scorer = self._reference.open()
        self._ended = time.perf_counter()
        return scorer

    @property
    def seconds(self) -> float:
        """The seconds of opening so far; waits for its end."""
        return (self._ended or time.perf_counter()) - self._began


def _planned(
    job: CacheJob, plan: Plan | None, slices: Slices, part: Part | None, progress: Progress
) -> Plan:
    """An existing plan, or a new one, with all rows encoded."""
    if plan is None:
        more = f" and {counted(len(job.inputs) - 1, 'files')} more" if job.inputs[1:] else ""
        progress.log(f"{job.inputs[0].path.name}{more}: read as {job.shape.read_as}")
        if job.shape.unread:
            progress.log(not_read(job.shape.unread))
        return make_plan(job, encode(slices, job.config, part, progress=progress), progress)
    # Damage is detected before hours of work.
    if len(job.cache.done()) < len(plan.numbers):
        job.cache.prepare_work()
        encoded = encode(slices, job.config, part, progress=progress)
        if encoded.shards(job.config.cache.shards) != plan.shards:
            raise CorruptionError(
                f"{job.cache.shown(job.cache.work)}: its rows, prepared again, differ from its "
                "plan. Delete it and run again, which scores rows again that no other cache has."
            )
    return plan


def _describe(run: Run, job: CacheJob, plan: Plan) -> None:
    run.log_params(job.fingerprint)
    run.set_tags({"align.plan_key": plan.plan_key, "align.reference_key": plan.reference_key})
    sentence = (
        f"Log-probs of {quoted(model_name(plan.model))} for {counted(plan.rows_in, 'rows')} of "
        f"{quoted(data_name([entry.name for entry in plan.inputs]))}."
    )
    chosen = {
        "cache": job.cache,
        "reference": plan.model,
        "adapter": plan.adapter,
        "data": ", ".join(map(origin_of, job.config.data.files)),
        "tokens.max_length": job.config.tokens.max_length,
        "cache.kl_pairs": job.config.cache.kl_pairs,
    }
    run.describe(description(sentence, chosen))
    run.log_files(plan.inputs)


def _show_row(job: CacheJob, shards: Shards, progress: Progress) -> None:
    """Shows the model's input for the first row with all of its completions.

    The text is only shown on the terminal and never recorded.
    """
    numbers = shards.plan.numbers
    if all(map(shards.is_done, numbers)):
        return
    rows = shards.build(shards.encoded_rows(), numbers[0]).rows
    if len(rows):
        file, side = job.paths[int(rows.file[0])].name, job.config.tokens.prompt_side
        for line in lines_of(rows.between(0, 1), job.tokenizer, file=file, prompt_side=side):
            progress.log(line.plain)


def _scored(
    job: CacheJob,
    shards: Shards,
    opening: _Opening | None,
    part: Part | None,
    progress: Progress,
) -> Iterator[ScoringCounts]:
    """Scores the shards of this part, the largest first; yields the counts of each."""
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
        gpus = scoring.ray_gpus_per_worker or float(job.device == "cuda")
        scorer, todo = ShardScorer(shards, Progress()), [*missing()]
        made = run_on_ray(scorer, todo, "shard", scoring.ray_address, scoring.ray_workers, gpus)
        with closing(made):
            for shard, done in made:
                progress.advance(rows[shard])
                if done:
                    yield done
    else:
        scorer = ShardScorer(shards, progress, opening.result if opening else None)
        with closing(scorer.score_each(missing())) as made_here:
            yield from made_here
    progress.end()


def _published(job: CacheJob, plan: Plan) -> tuple[Manifest | None, bool]:
    """The manifest, if every shard is finished, and whether this process wrote it."""
    cache = job.cache
    cache.sync()
    shards = cache.done()
    if cache.manifest_file.exists():
        return _of_another_process(job), False
    if len(shards) < len(plan.numbers):
        return (None if cache.plan.is_file() else _of_another_process(job)), False
    manifest = cache.build_manifest(plan, shards)
    _require_usable(job, manifest)
    if not cache.finish(manifest):
        return _of_another_process(job), False
    has_published = cache.tidy()
    register_cache(cache)
    return manifest, has_published


def _of_another_process(job: CacheJob) -> Manifest:
    """The manifest that another process wrote meanwhile; an error if there is none."""
    cache = job.cache
    if job.is_published:
        manifest = cache.manifest()
        if not cache.is_tidy(manifest):
            cache.tidy()
        register_cache(cache)
        return manifest
    cache.retire()  # late files of this process
    if cache.manifest_file.exists():
        raise LockedError(
            f"{cache}: a run with other settings finished its cache here. Choose another "
            "--output: common scores are copied."
        )
    raise LockedError(f"{cache}: its work was removed meanwhile. Run the same command again.")


def _require_usable(job: CacheJob, manifest: Manifest) -> None:
    """Refuses to publish if scoring rejected more rows than allowed, or all of them."""
    allowed = job.config.data.max_bad_frac
    rejected = RejectedRows(manifest.reasons, manifest.rows_in, allowed)
    if not rejected.exceed_limit:
        return
    cache = job.cache
    what = (
        f"{rejected} and {manifest.rows} rows would remain. The rejected rows are listed in "
        f"{cache.shown(cache.rejected)}."
    )
    again = f"To score again, first delete {cache.shown(cache.work)}, which keeps all scores."
    is_float16 = job.fingerprint.get("model.dtype") == "float16"
    remedy = "try --dtype bfloat16, and check the weights" if is_float16 else "check the weights"
    hints = {
        "nonfinite_logp": f"nonfinite_logp: the reference's log-prob is not finite; {remedy}.",
        "oom": "oom: use a device with more memory, or lower --max-length.",
        "no_mismatch": "no_mismatch: raise --max-length, or pass --kl-pairs 0.",
    }
    if {reason for shard in manifest.shards for reason in shard.reasons} == {"nonfinite_logp"}:
        raise NonFiniteError(f"{what}\n{hints['nonfinite_logp']} {again}")
    reasons = [reason for reason, _ in Counter(manifest.reasons).most_common()]
    more = ["Or allow more with --max-bad-frac."] if manifest.rows else []
    shown = [hints[reason] for reason in reasons if reason in hints]
    raise BadDataError("\n".join([what, *shown, *more, again]))


def _lines(
    job: CacheJob, made: Manifest | None, counts: ScoringCounts | None = None
) -> tuple[str, ...]:
    """The size of the cache, the scoring done for it, if any, and the dropped rows."""
    if made is None:
        return ()
    lines = [
        f"{job.cache}: {counted(made.rows, 'rows')}, {made.branches:,} completions, "
        f"{made.tokens:,} completion tokens in {counted(len(made.shards), 'shards')}",
        f"cache id {made.root}",
        counts.text() if counts else "already complete: nothing was scored",
    ]
    faults = {reason: count for reason, count in made.reasons.items() if reason != TIE}
    if faults:
        total, each = sum(faults.values()), (f"{n} {reason}" for reason, n in faults.items())
        lines.append(f"{total} of {made.rows_in:,} rows dropped: {', '.join(each)}")
    if ties := made.reasons.get(TIE):
        lines.append(f"{ties:,} of {made.rows_in:,} rows left out: ties have no chosen answer")
    lines += [f"note: {counted(count, worded(name))}" for name, count in sorted(made.notes.items())]
    # The command for training, with the method of the settings or a usual one.
    method, usual = job.config.train.method, "kto" if job.config.cache.kl_pairs else "dpo"
    if not made.is_scored:
        usual = "orpo" if job.shape.declared.kind == "pair" else "sft"
        known = METHODS.get(method)
        method = method if known and "reference" not in known.needs else ""
    shown = {"train.method": method or usual, "train.cache": str(job.cache)}
    if job.config.tokens.chat_template:  # training has to know it too
        shown["tokens.chat_template"] = job.config.tokens.chat_template
    return (*lines, f"next: align train {as_flags(shown, 'train')}")
