"""Scores the shards of a plan, in whichever process an executor chooses."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from rich.text import Text

from ...schemas.cache import Plan
from ...schemas.errors import FingerprintError, Interrupted
from ...schemas.json_codec import digest
from ...schemas.rows import Reference, Scorer
from ...stages.data.preview import lines_of
from ...stages.pairing.partition import EncodedRows
from ...stages.pairing.shard_rows import CutRule, ShardRows, build_shard
from ...stages.score.reuse import ReuseIndex
from ...stages.score.score import BatchDone, KnownScores, ScoringRules, UnitScores, score_unit
from ...stages.storage.cache.cache_folder import WorkFolder
from ...stages.storage.cache.commits import UnitFacts, commit_unit
from ...stages.tracking.progress import Progress
from ..jobs.counts import Counts
from .cache_compatibility import open_earlier
from .precompute_plan import CacheJob
from .prepare_tasks import Encoded, EncodeTasks


@dataclass
class Tally(Counts):
    """Counts of the work of this process."""

    units: int = 0
    rows: int = 0
    scored: int = 0  # branches
    reused: int = 0  # branches
    tokens: int = 0  # run through the model, padding included
    padding: int = 0
    seconds: float = 0.0

    @staticmethod
    def of_unit(rows: int, scores: UnitScores) -> Tally:
        """The counts of one unit."""
        return Tally(
            units=1,
            rows=rows,
            scored=scores.branches - scores.reused,
            reused=scores.reused,
            tokens=scores.run_tokens,
            padding=scores.padding,
        )

    @property
    def step(self) -> int:
        """The units made now."""
        return self.units

    def text(self) -> str:
        """The counts in a sentence."""
        return (
            f"scored {self.scored:,} branches, reused {self.reused:,} of "
            f"{self.scored + self.reused:,}, in {self.seconds:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a tracking store."""
        branches = max(self.scored + self.reused, 1)
        return {
            "units": float(self.units),
            "rows": float(self.rows),
            "branches/scored": float(self.scored),
            "branches/reused": float(self.reused),
            "reuse_share": self.reused / branches,
            "tokens": float(self.tokens),
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "padding_share": self.padding / max(self.tokens, 1),
        }


@dataclass(frozen=True)
class ScoreTasks:
    """The shards of a plan as tasks, by key range; the reference travels without its weights."""

    work: WorkFolder
    plan: Plan
    encoding: EncodeTasks  # which all are done
    reference: Reference
    num_pairs: int
    cut_rule: CutRule
    tokens_per_batch: int
    keep_token_logps: bool
    run_id: str
    made_by: tuple[str, int]  # host and process

    name = "scoring"
    unit = "rows"
    is_input = False

    @staticmethod
    def of(job: CacheJob, plan: Plan, reference: Reference, run_id: str) -> ScoreTasks:
        """The shards of a plan whose rows are encoded."""
        config = job.config
        return ScoreTasks(
            work=job.work,
            plan=plan,
            encoding=job.encoding,
            reference=reference,
            num_pairs=config.cache.kl_pairs,
            cut_rule=CutRule(config.tokens.max_length, job.tokenizer.stops.tokens),
            tokens_per_batch=config.scoring.tokens_per_batch,
            keep_token_logps=config.cache.token_logps,
            run_id=run_id,
            made_by=_this_process(),
        )

    @property
    def sizes(self) -> Sequence[int]:
        """The rows of each shard."""
        return self.plan.shards

    @property
    def costs(self) -> Sequence[float]:
        """The rows of each shard: keys are hashes, so their lengths are alike."""
        return self.plan.shards

    def is_committed(self, task: int) -> bool:
        """Whether a shard has its commit or no rows, or all have had one: then the plan is gone."""
        has_no_rows = not self.plan.shards[task]
        return has_no_rows or self.work.commit(task).is_file() or not self.work.is_planned

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[Tally]]:
        """Opens the encoded rows, the model and earlier caches once a shard needs them."""
        if self.made_by != _this_process():
            self._require_same_reference()
        return _ShardScorer(self, progress).finish_each

    def encoded_rows(self) -> EncodedRows:
        """What reads the rows of a shard."""
        shape, options = self.encoding.encoding.shape, self.encoding.encoding.options
        return Encoded(self.encoding, self.encoding.records()).rows(
            shards=len(self.plan.shards),
            prompt_side=options.prompt_side if shape.declared.is_long else None,
        )

    def build(self, rows: EncodedRows, shard: int) -> ShardRows:
        """The rows of a shard with their KL partners."""
        shards = len(self.plan.shards)
        return build_shard(rows.read, shard, shards, self.num_pairs, self.cut_rule)

    def _require_same_reference(self) -> None:
        """Refuses to score with what this process finds at the path, if it is something else."""
        found = dict(self.reference.identity())
        if digest(found) == self.plan.reference_key:
            return
        differing = [name for name in found if found[name] != self.plan.fingerprint.get(name)]
        raise FingerprintError(
            f"On {socket.gethostname()} the reference is not the one that this run began with "
            f"({', '.join(differing)} differ). Every machine needs the same model folder, the same "
            "versions and the same kind of device (--device)."
        )


def lines_of_first(tasks: ScoreTasks, job: CacheJob) -> Iterator[Text]:
    """The model's input for the first row that has all of its completions.

    The lines hold text of the data: they are for who runs the command, and for no record of it.
    """
    first = next(shard for shard, rows in enumerate(tasks.plan.shards) if rows)
    rows = tasks.build(tasks.encoded_rows(), first).rows
    if len(rows):
        file = job.paths[int(rows.file[0])].name
        side = job.config.tokens.prompt_side
        yield from lines_of(rows.between(0, 1), job.tokenizer, file=file, prompt_side=side)


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _held_to_threads(plan: Plan) -> AbstractContextManager[None]:
    """Uses the plan's number of threads where it decides the last bits of a number."""
    if plan.fingerprint.get("model.device") != "cpu":
        return nullcontext()
    # Here, because only a reference that computes by torch needs it imported.
    from ...stages.model.reference import on_threads  # noqa: PLC0415

    return on_threads(plan.threads)


@dataclass
class _Meter:
    """Shows a shard's rows as done in step with its batches."""

    progress: Progress
    rows: int
    share: float = 0.0
    shown: int = 0

    def add(self, batch: BatchDone) -> None:
        """Advances by the batch's share; a shard begun again never goes past its end."""
        self.share = min(self.share + batch.share, 1.0)
        more = int(self.share * self.rows) - self.shown
        self.shown += more
        self.progress.advance(more, tokens=batch.tokens, padding=batch.padding)

    def close(self) -> None:
        """The shard is committed; a signal in here may close it again."""
        more, self.shown = self.rows - self.shown, self.rows
        self.progress.advance(more)


@dataclass(frozen=True)
class _ReadShard:
    """A shard before it is scored."""

    number: int
    size: int  # rows of the plan, those without a partner too
    shard: ShardRows
    known: KnownScores


@dataclass(frozen=True)
class _Writing:
    """A shard that is being written."""

    tally: Future[Tally]
    meter: _Meter

    def finished(self) -> Tally:
        """Its counts, once it is committed; the error that kept it from that."""
        tally = self.tally.result()
        self.meter.close()
        return tally

    def require_no_failure(self) -> None:
        """Raises the error of a shard that could not be written."""
        if self.tally.done():
            self.tally.result()


def _first_finished(writing: deque[_Writing]) -> Tally:
    """The counts of the first shard, which is no longer among them."""
    tally = writing[0].finished()
    writing.popleft()
    return tally


@dataclass(frozen=True)
class _ShardScorer:
    """Scores the shards of a plan; the model and earlier caches are opened when needed.

    While one shard is scored, the rows of the next are read and the one before is written, in a
    thread each: three shards are in memory, and at most two of them are scored and not committed.
    """

    tasks: ScoreTasks
    progress: Progress

    def finish_each(self, shards: Iterable[int]) -> Generator[Tally]:
        """Scores and commits shards; gives the counts of each once it is committed."""
        writing: deque[_Writing] = deque()
        with (
            one_thread("align-read") as reader,
            ThreadPoolExecutor(1, "align-write") as writer,  # what it is given is written
        ):
            try:
                for read in _with_next_begun(reader, self._read, shards):
                    meter = _Meter(self.progress, read.size)
                    scores, numerics = self._scored(read, meter, writing)
                    done = writer.submit(self._commit_after, [*writing], read, scores, numerics)
                    writing.append(_Writing(done, meter))
                    if len(writing) > 1:
                        yield _first_finished(writing)
                while writing:
                    yield _first_finished(writing)
            except (Exception, Interrupted):
                for one in writing:
                    if not one.tally.exception():
                        yield one.finished()  # it is kept, and counts
                raise

    def _read(self, number: int) -> _ReadShard:
        shard = self.tasks.build(self._rows, number)
        known = self.reuse.find(shard.rows, first_key=shard.first_key, last_key=shard.last_key)
        return _ReadShard(number, self.tasks.sizes[number], shard, known)

    @cached_property
    def _rows(self) -> EncodedRows:
        return self.tasks.encoded_rows()

    def _scored(
        self, read: _ReadShard, meter: _Meter, writing: Iterable[_Writing]
    ) -> tuple[UnitScores, dict[str, str]]:
        """The scores of a shard, and how they were computed; stops if another cannot be written."""

        def on_batch(batch: BatchDone) -> None:
            for one in writing:
                one.require_no_failure()
            meter.add(batch)

        with _held_to_threads(self.tasks.plan):
            scores = score_unit(
                read.shard.rows, read.known, self.rules, scorer=self.scorer, on_batch=on_batch
            )
            numerics = dict(self.scorer().describe()) if scores.run_tokens else {}
        return scores, numerics or read.known.numerics

    def _commit_after(
        self,
        before: Sequence[_Writing],
        read: _ReadShard,
        scores: UnitScores,
        numerics: dict[str, str],
    ) -> Tally:
        """Writes nothing where a shard before it could not be written."""
        for one in before:  # which the one thread that writes has ended
            one.require_no_failure()
        return self._commit(read, scores, numerics)

    def _commit(self, read: _ReadShard, scores: UnitScores, numerics: dict[str, str]) -> Tally:
        tasks, shard = self.tasks, read.shard
        facts = UnitFacts(
            first_key=shard.first_key,
            last_key=shard.last_key,
            tokens_per_batch=scores.tokens_per_batch,
            rejected=(*shard.rejected, *scores.rejected),
            notes={name: count for name, count in sorted(shard.notes.items()) if count},
            numerics=numerics,
        )
        commit_unit(tasks.work, tasks.run_id, read.number, scores.block, facts)
        return Tally.of_unit(read.size, scores)

    @cached_property
    def reuse(self) -> ReuseIndex:
        """The scores of earlier caches."""
        earlier = open_earlier(self.tasks.plan.reuse, self.tasks.plan)
        return ReuseIndex(earlier, need_token_logps=self.rules.keep_token_logps)

    @cached_property
    def rules(self) -> ScoringRules:
        """The rules by which shards are scored."""
        return ScoringRules(
            tokens_per_batch=self.tasks.tokens_per_batch,
            hidden_size=self.tasks.reference.hidden_size(),
            keep_token_logps=self.tasks.keep_token_logps,
        )

    def scorer(self) -> Scorer:
        """The reference model, loaded once."""
        return self._scorer

    @cached_property
    def _scorer(self) -> Scorer:
        scorer = self.tasks.reference.open()
        how = ", ".join(f"{name} {value}" for name, value in scorer.describe().items())
        self.progress.say(f"reference: {how}")
        return scorer


@contextmanager
def one_thread(name: str) -> Iterator[ThreadPoolExecutor]:
    """A thread that ends with the block: what it is at is finished, what has not begun is not."""
    pool = ThreadPoolExecutor(1, name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _with_next_begun(
    reader: ThreadPoolExecutor, read: Callable[[int], _ReadShard], shards: Iterable[int]
) -> Iterator[_ReadShard]:
    """Each shard as it is read, while the one behind it is being read."""
    reading: Future[_ReadShard] | None = None
    for shard in shards:
        following = reader.submit(read, shard)
        if reading:
            yield reading.result()
        reading = following
    if reading:
        yield reading.result()
