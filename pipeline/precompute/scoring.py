"""Scores the shards of a plan, in this process or in a Ray actor."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from ...schemas.cache import Plan, StopTokens
from ...schemas.config import Config
from ...schemas.errors import FingerprintError, Interrupted
from ...schemas.json_codec import digest
from ...schemas.rows import Reference, Scorer
from ...stages.pairing.partition import ShardReader
from ...stages.pairing.shard_rows import ShardRows, build_shard
from ...stages.score.reuse import ReuseIndex
from ...stages.score.score import (
    BatchDone,
    KnownScores,
    ScoringRules,
    ShardScores,
    score_shard,
    unscored,
)
from ...stages.tracking.progress import Progress
from .imported import ImportedReference
from .opening import identity_of, open_earlier
from .prepare import Slices


@dataclass
class ScoringCounts:
    """Counts of the shards that this process or its actors made."""

    shards: int = 0
    rows: int = 0
    scored: int = 0  # completions
    reused: int = 0  # completions
    tokens: int = 0  # run through the model, with padding
    padding: int = 0
    seconds: float = 0.0

    def add(self, other: ScoringCounts) -> None:
        """Adds the counts of other shards."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    def text(self) -> str:
        """The counts in a sentence."""
        return (
            f"scored {self.scored:,} completions, reused {self.reused:,} of "
            f"{self.scored + self.reused:,}, in {self.seconds:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a tracking store."""
        return {
            "shards": float(self.shards),
            "rows": float(self.rows),
            "completions/scored": float(self.scored),
            "completions/reused": float(self.reused),
            "reuse_share": self.reused / max(self.scored + self.reused, 1),
            "tokens": float(self.tokens),
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "padding_share": self.padding / max(self.tokens, 1),
        }


@dataclass(frozen=True)
class Shards:
    """The shards of a plan, by key range; the reference is pickled without its weights."""

    plan: Plan
    slices: Slices  # all are encoded
    reference: Reference
    config: Config

    def is_done(self, shard: int) -> bool:
        """Whether a shard is finished or has no rows, or the whole plan is finished and removed."""
        cache = self.slices.cache
        is_made = cache.record(shard).is_file() or not cache.plan.is_file()
        return is_made or not self.plan.shards[shard]

    def encoded_rows(self) -> ShardReader:
        """A reader of all shards' rows."""
        is_long = self.slices.encoding.shape.declared.is_long
        return self.slices.encoded().rows(
            shards=len(self.plan.shards),
            prompt_side=self.config.tokens.prompt_side if is_long else None,
        )

    def build(self, rows: ShardReader, shard: int) -> ShardRows:
        """The rows of a shard with their KL completions."""
        return build_shard(
            rows.read,
            shard,
            len(self.plan.shards),
            self.config.cache.kl_pairs,
            max_length=self.config.tokens.max_length,
            stops=StopTokens.of(self.plan.fingerprint).tokens,
        )


class ShardScorer:
    """Scores shards one after another; opens the reference and readers once, at first use."""

    def __init__(
        self,
        shards: Shards,
        progress: Progress,
        open_scorer: Callable[[], Scorer] | None = None,
    ) -> None:
        self._shards, self._progress = shards, progress
        self._open = open_scorer or shards.reference.open
        self._rules = ScoringRules(
            tokens_per_batch=shards.config.scoring.tokens_per_batch,
            hidden_size=shards.reference.hidden_size(),
            keep_token_logps=shards.config.cache.token_logps,
        )

    def __call__(self, shard: int) -> ScoringCounts | None:
        """Scores a shard in an actor, unless it is done; the machine's reference is checked."""
        if self._shards.is_done(shard):
            return None
        plan, found = self._shards.plan, identity_of(self._shards.reference, self._shards.config)
        if digest(found) != plan.reference_key:
            differing = [name for name in found if found[name] != plan.fingerprint.get(name)]
            raise FingerprintError(
                f"On {socket.gethostname()} the reference differs from this run's "
                f"({', '.join(differing)}). Give every machine the same model folder, versions and "
                "kind of device (--device)."
            )
        (counts,) = self.score_each([shard])
        return counts

    def score_each(self, shards: Iterable[int]) -> Generator[ScoringCounts]:
        """Scores and writes shards, and yields the counts of each once it is written.

        While one shard is scored, a thread reads the next and another writes the previous one. So
        three are in memory, and a kill loses at most two. An error of either thread ends the work.
        """
        reader, writer = ThreadPoolExecutor(1, "align-read"), ThreadPoolExecutor(1, "align-write")
        writing: list[_InFlight] = []  # shards that are written but not counted yet

        def counted() -> ScoringCounts:
            counts = writing[0].finished()
            del writing[0]  # after the wait, because a signal may interrupt it
            return counts

        try:
            for number, shard, known in self._read_ahead(reader, shards):
                shown = _InFlight(self._progress, self._shards.plan.shards[number])
                before = writing[0] if writing else None
                scores, numerics = self._score(shard, known, shown, before)
                if before:
                    before.commit.result()  # raises if the previous shard was not written
                shown.commit = writer.submit(
                    self._commit, number, shard, scores, numerics or known.numerics
                )
                writing.append(shown)
                if before:
                    yield counted()
            if writing:
                yield counted()
        except (Exception, Interrupted):
            for one in writing:
                if not one.commit.exception():
                    yield one.finished()  # written shards count
            raise
        finally:
            reader.shutdown(cancel_futures=True)
            writer.shutdown()

    def _read_ahead(
        self, reader: ThreadPoolExecutor, shards: Iterable[int]
    ) -> Iterator[tuple[int, ShardRows, KnownScores]]:
        """Each shard, while the next one is being read."""
        reading: Future[tuple[int, ShardRows, KnownScores]] | None = None
        for number in shards:
            following = reader.submit(self._read, number)
            if reading:
                yield reading.result()
            reading = following
        if reading:
            yield reading.result()

    def _read(self, number: int) -> tuple[int, ShardRows, KnownScores]:
        shard = self._shards.build(self._rows, number)
        known = self._earlier.find(shard.rows, first_key=shard.first_key, last_key=shard.last_key)
        return number, shard, known

    def _score(
        self, shard: ShardRows, known: KnownScores, shown: _InFlight, before: _InFlight | None
    ) -> tuple[ShardScores, dict[str, str]]:
        """The scores of a shard and their numerics; fails if `before` was not written."""
        if not self._shards.config.cache.scored:
            return unscored(shard.rows), {}

        def on_batch(batch: BatchDone) -> None:
            if before and before.commit.done():
                before.commit.result()
            shown.add(batch)

        with _threads_of(self._shards.plan):
            scores = score_shard(
                shard.rows, known, self._rules, scorer=lambda: self._scorer, on_batch=on_batch
            )
            numerics = dict(self._scorer.describe()) if scores.run_tokens else {}
        return scores, numerics

    def _commit(
        self, number: int, shard: ShardRows, scores: ShardScores, numerics: dict[str, str]
    ) -> ScoringCounts:
        self._shards.slices.cache.commit(
            number,
            scores.block,
            keys=(shard.first_key, shard.last_key),
            rejected=(*shard.rejected, *scores.rejected),
            notes={name: count for name, count in sorted(shard.notes.items()) if count},
            numerics=numerics,
        )
        return ScoringCounts(
            shards=1,
            rows=self._shards.plan.shards[number],
            scored=scores.completions - scores.reused,
            reused=scores.reused,
            tokens=scores.run_tokens,
            padding=scores.padding,
        )

    @cached_property
    def _rows(self) -> ShardReader:
        return self._shards.encoded_rows()

    @cached_property
    def _earlier(self) -> ReuseIndex | ImportedReference:
        plan, reference = self._shards.plan, self._shards.reference
        if isinstance(reference, ImportedReference):
            return reference
        earlier = open_earlier(plan.reuse, plan.reference_key)
        return ReuseIndex(earlier, need_token_logps=self._rules.keep_token_logps)

    @cached_property
    def _scorer(self) -> Scorer:
        scorer = self._open()
        how = ", ".join(f"{name} {value}" for name, value in scorer.describe().items())
        self._progress.log(f"reference: {how}")
        return scorer


def _threads_of(plan: Plan) -> AbstractContextManager[None]:
    """Uses the plan's number of threads, if it decides the last bits of sums."""
    if plan.fingerprint.get("model.device") != "cpu":
        return nullcontext()
    # Imported here, because only some references need torch.
    from ...stages.model.reference import on_threads  # noqa: PLC0415

    return on_threads(plan.threads)


class _InFlight:
    """A shard in progress; its rows are shown as done along with its batches."""

    commit: Future[ScoringCounts]  # set once the shard is scored

    def __init__(self, progress: Progress, rows: int) -> None:
        self._progress, self._rows = progress, rows
        self._share, self._shown = 0.0, 0

    def add(self, batch: BatchDone) -> None:
        """Advances by the batch's share; a shard that starts again never exceeds its rows."""
        self._share = min(self._share + batch.share, 1.0)
        more = int(self._share * self._rows) - self._shown
        self._shown += more
        self._progress.advance(more, tokens=batch.tokens, padding=batch.padding)

    def finished(self) -> ScoringCounts:
        """Waits for the shard to be written; returns its counts, or raises the error."""
        counts = self.commit.result()
        more, self._shown = self._rows - self._shown, self._rows  # first: a signal may come here
        self._progress.advance(more)
        return counts
