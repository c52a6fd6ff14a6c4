"""Scores the shards of a plan, in this process or in an actor of Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ...schemas.cache import Plan
from ...schemas.errors import FingerprintError, Interrupted
from ...schemas.json_codec import digest
from ...schemas.rows import Reference, Scorer
from ...stages.pairing.partition import EncodedRows
from ...stages.pairing.shard_rows import CutRule, ShardRows, build_shard
from ...stages.score.reuse import ReuseIndex
from ...stages.score.score import BatchDone, KnownScores, ScoringRules, UnitScores, score_unit
from ...stages.storage.cache.cache_folder import WorkFolder
from ...stages.storage.cache.commits import UnitFacts, commit_unit
from ...stages.tracking.progress import Progress
from .opening import CacheJob, open_earlier
from .prepare import Slices

Read = TypeVar("Read")


@dataclass
class Tally:
    """Counts of the shards that this process has made, or has had made."""

    units: int = 0
    rows: int = 0
    scored: int = 0  # branches
    reused: int = 0  # branches
    tokens: int = 0  # run through the model, padding included
    padding: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Adds the counts of other shards."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    def text(self) -> str:
        """The counts in a sentence."""
        return (
            f"scored {self.scored:,} branches, reused {self.reused:,} of "
            f"{self.scored + self.reused:,}, in {self.seconds:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a tracking store."""
        return {
            "units": float(self.units),
            "rows": float(self.rows),
            "branches/scored": float(self.scored),
            "branches/reused": float(self.reused),
            "reuse_share": self.reused / max(self.scored + self.reused, 1),
            "tokens": float(self.tokens),
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "padding_share": self.padding / max(self.tokens, 1),
        }


@dataclass(frozen=True)
class Shards:
    """The shards of a plan, by key range; the reference travels without its weights."""

    work: WorkFolder
    plan: Plan
    slices: Slices  # which are all encoded
    reference: Reference
    num_pairs: int
    cut_rule: CutRule
    rules: ScoringRules
    run_id: str

    @staticmethod
    def of(job: CacheJob, plan: Plan, slices: Slices, reference: Reference) -> Shards:
        """The shards of a plan whose rows are encoded."""
        config = job.config
        rules = ScoringRules(
            tokens_per_batch=config.scoring.tokens_per_batch,
            hidden_size=reference.hidden_size(),
            keep_token_logps=config.cache.token_logps,
        )
        return Shards(
            work=job.work,
            plan=plan,
            slices=slices,
            reference=reference,
            num_pairs=config.cache.kl_pairs,
            cut_rule=CutRule(config.tokens.max_length, job.tokenizer.stops.tokens),
            rules=rules,
            run_id=job.run_id,
        )

    def is_done(self, shard: int) -> bool:
        """Whether a shard has its commit or no rows, or all have had one: then the plan is gone."""
        has_no_rows = not self.plan.shards[shard]
        return has_no_rows or self.work.commit(shard).is_file() or not self.work.is_planned

    def require_same_reference(self) -> None:
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

    def encoded_rows(self) -> EncodedRows:
        """What reads the rows of a shard."""
        shape, options = self.slices.encoding.shape, self.slices.encoding.options
        return self.slices.encoded().rows(
            shards=len(self.plan.shards),
            prompt_side=options.prompt_side if shape.declared.is_long else None,
        )

    def build(self, rows: EncodedRows, shard: int) -> ShardRows:
        """The rows of a shard with their KL partners."""
        shards = len(self.plan.shards)
        return build_shard(rows.read, shard, shards, self.num_pairs, self.cut_rule)


class ShardScorer:
    """Scores shards one after another; what it opens, it opens once, when a shard needs it."""

    def __init__(self, shards: Shards, progress: Progress) -> None:
        self._shards, self._progress = shards, progress

    def __call__(self, shard: int) -> Tally | None:
        """In an actor, whose machine may have another reference: scores a shard, if none has."""
        if self._shards.is_done(shard):
            return None
        self._shards.require_same_reference()
        (tally,) = self.score_each([shard])
        return tally

    def score_each(self, shards: Iterable[int]) -> Generator[Tally]:
        """Scores and commits shards, and gives the counts of each once it is committed.

        While one is scored, a thread reads the next and another writes the one before: three are in
        memory, and a kill loses two at most. An error of either thread ends the work.
        """
        reader, writer = ThreadPoolExecutor(1, "align-read"), ThreadPoolExecutor(1, "align-write")
        writing: list[_Writing] = []
        try:
            for number, shard, known in _read_ahead(reader, self._read, shards):
                shown = _Shown(self._progress, self._shards.plan.shards[number])
                scores, numerics = self._score(shard, known, shown, writing)
                for one in writing:
                    one.commit.result()  # behind one that could not be written nothing is
                commit = writer.submit(self._commit, number, shard, scores, numerics)
                writing.append(_Writing(commit, shown))
                if len(writing) > 1:
                    done = writing[0].finished()
                    del writing[0]
                    yield done
            while writing:
                done = writing[0].finished()
                del writing[0]
                yield done
        except (Exception, Interrupted):
            for one in writing:
                if not one.commit.exception():
                    yield one.finished()  # it is kept, and counts
            raise
        finally:
            reader.shutdown(cancel_futures=True)
            writer.shutdown()

    def _read(self, number: int) -> tuple[int, ShardRows, KnownScores]:
        shard = self._shards.build(self._rows, number)
        known = self._earlier.find(shard.rows, first_key=shard.first_key, last_key=shard.last_key)
        return number, shard, known

    def _score(
        self, shard: ShardRows, known: KnownScores, shown: _Shown, writing: Sequence[_Writing]
    ) -> tuple[UnitScores, dict[str, str]]:
        """The scores of a shard, and how they were computed; stops if another cannot be written."""

        def on_batch(batch: BatchDone) -> None:
            for one in writing:
                if one.commit.done():
                    one.commit.result()
            shown.add(batch)

        rules = self._shards.rules
        with _on_threads_of(self._shards.plan):
            scores = score_unit(
                shard.rows, known, rules, scorer=lambda: self._scorer, on_batch=on_batch
            )
            numerics = dict(self._scorer.describe()) if scores.run_tokens else {}
        return scores, numerics or known.numerics

    def _commit(
        self, number: int, shard: ShardRows, scores: UnitScores, numerics: dict[str, str]
    ) -> Tally:
        facts = UnitFacts(
            first_key=shard.first_key,
            last_key=shard.last_key,
            tokens_per_batch=scores.tokens_per_batch,
            rejected=(*shard.rejected, *scores.rejected),
            notes={name: count for name, count in sorted(shard.notes.items()) if count},
            numerics=numerics,
        )
        commit_unit(self._shards.work, self._shards.run_id, number, scores.block, facts)
        return Tally(
            units=1,
            rows=self._shards.plan.shards[number],
            scored=scores.branches - scores.reused,
            reused=scores.reused,
            tokens=scores.run_tokens,
            padding=scores.padding,
        )

    @cached_property
    def _rows(self) -> EncodedRows:
        return self._shards.encoded_rows()

    @cached_property
    def _earlier(self) -> ReuseIndex:
        earlier = open_earlier(self._shards.plan.reuse, self._shards.plan.reference_key)
        return ReuseIndex(earlier, need_token_logps=self._shards.rules.keep_token_logps)

    @cached_property
    def _scorer(self) -> Scorer:
        scorer = self._shards.reference.open()
        how = ", ".join(f"{name} {value}" for name, value in scorer.describe().items())
        self._progress.say(f"reference: {how}")
        return scorer


def _read_ahead(
    reader: ThreadPoolExecutor, read: Callable[[int], Read], shards: Iterable[int]
) -> Iterator[Read]:
    """Each shard as it is read, while the one behind it is being read."""
    reading: Future[Read] | None = None
    for shard in shards:
        following = reader.submit(read, shard)
        if reading:
            yield reading.result()
        reading = following
    if reading:
        yield reading.result()


def _on_threads_of(plan: Plan) -> AbstractContextManager[None]:
    """Uses the plan's number of threads where it decides the last bits of a number."""
    if plan.fingerprint.get("model.device") != "cpu":
        return nullcontext()
    # Here, because only a reference that computes by torch needs it imported.
    from ...stages.model.reference import on_threads  # noqa: PLC0415

    return on_threads(plan.threads)


class _Shown:
    """Shows a shard's rows as done in step with its batches."""

    def __init__(self, progress: Progress, rows: int) -> None:
        self._progress, self._rows = progress, rows
        self._share, self._shown = 0.0, 0

    def add(self, batch: BatchDone) -> None:
        """Advances by the batch's share; a shard begun again never goes past its end."""
        self._share = min(self._share + batch.share, 1.0)
        more = int(self._share * self._rows) - self._shown
        self._shown += more
        self._progress.advance(more, tokens=batch.tokens, padding=batch.padding)

    def close(self) -> None:
        """The shard is committed; a signal in here may close it again."""
        more, self._shown = self._rows - self._shown, self._rows
        self._progress.advance(more)


@dataclass(frozen=True)
class _Writing:
    """A shard that is being written."""

    commit: Future[Tally]
    shown: _Shown

    def finished(self) -> Tally:
        """Its counts, once it is committed; the error that kept it from that."""
        tally = self.commit.result()
        self.shown.close()
        return tally
