"""Scores the shards of a plan, in this process or in an actor of Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from ...schemas.cache import Plan, Stops
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
from .opening import identity_of, open_earlier
from .prepare import Slices


@dataclass
class Tally:
    """Counts of the shards that this process has made, or has had made."""

    shards: int = 0
    rows: int = 0
    scored: int = 0  # completions
    reused: int = 0  # completions
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
    """The shards of a plan, by key range; the reference travels without its weights."""

    plan: Plan
    slices: Slices  # which are all encoded
    reference: Reference
    config: Config

    def is_done(self, shard: int) -> bool:
        """Whether a shard has its record or no rows, or all have had one: then the plan is gone."""
        cache = self.slices.cache
        is_made = cache.record(shard).is_file() or not cache.plan.is_file()
        return is_made or not self.plan.shards[shard]

    def encoded_rows(self) -> ShardReader:
        """The rows of all shards, to be read by shard."""
        is_long = self.slices.encoding.shape.declared.is_long
        return self.slices.encoded().rows(
            shards=len(self.plan.shards),
            prompt_side=self.config.tokens.prompt_side if is_long else None,
        )

    def build(self, rows: ShardReader, shard: int) -> ShardRows:
        """The rows of a shard with their KL partners."""
        return build_shard(
            rows.read,
            shard,
            len(self.plan.shards),
            self.config.cache.kl_pairs,
            max_length=self.config.tokens.max_length,
            stops=Stops.of(self.plan.fingerprint).tokens,
        )


class ShardScorer:
    """Scores shards one after another; what it opens, it opens once, when a shard needs it."""

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

    def __call__(self, shard: int) -> Tally | None:
        """In an actor, whose machine may have another reference: scores a shard, if none has."""
        if self._shards.is_done(shard):
            return None
        plan, found = self._shards.plan, identity_of(self._shards.reference, self._shards.config)
        if digest(found) != plan.reference_key:
            differing = [name for name in found if found[name] != plan.fingerprint.get(name)]
            raise FingerprintError(
                f"On {socket.gethostname()} the reference is not the one that this run began with "
                f"({', '.join(differing)} differ). Every machine needs the same model folder, the "
                "same versions and the same kind of device (--device)."
            )
        (tally,) = self.score_each([shard])
        return tally

    def score_each(self, shards: Iterable[int]) -> Generator[Tally]:
        """Scores and commits shards, and gives the counts of each once it is committed.

        While one is scored, a thread reads the next and another writes the one before: three are in
        memory, and a kill loses two at most. An error of either thread ends the work.
        """
        reader, writer = ThreadPoolExecutor(1, "align-read"), ThreadPoolExecutor(1, "align-write")
        writing: list[_InFlight] = []  # the shards that are being written, until they are counted

        def counted() -> Tally:
            tally = writing[0].finished()
            del writing[0]  # only now: a signal may come while its end is waited for
            return tally

        try:
            for number, shard, known in self._read_ahead(reader, shards):
                shown = _InFlight(self._progress, self._shards.plan.shards[number])
                before = writing[0] if writing else None
                scores, numerics = self._score(shard, known, shown, before)
                if before:
                    before.commit.result()  # behind one that could not be written nothing is
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
                    yield one.finished()  # it is kept, and counts
            raise
        finally:
            reader.shutdown(cancel_futures=True)
            writer.shutdown()

    def _read_ahead(
        self, reader: ThreadPoolExecutor, shards: Iterable[int]
    ) -> Iterator[tuple[int, ShardRows, KnownScores]]:
        """Each shard as it is read, while the one behind it is being read."""
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
        """The scores of a shard, and how they were computed; ends if `before` was not written."""
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
    ) -> Tally:
        self._shards.slices.cache.commit(
            number,
            scores.block,
            keys=(shard.first_key, shard.last_key),
            rejected=(*shard.rejected, *scores.rejected),
            notes={name: count for name, count in sorted(shard.notes.items()) if count},
            numerics=numerics,
        )
        return Tally(
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
    def _earlier(self) -> ReuseIndex:
        plan = self._shards.plan
        earlier = open_earlier(plan.reuse, plan.reference_key)
        return ReuseIndex(earlier, need_token_logps=self._rules.keep_token_logps)

    @cached_property
    def _scorer(self) -> Scorer:
        scorer = self._open()
        how = ", ".join(f"{name} {value}" for name, value in scorer.describe().items())
        self._progress.say(f"reference: {how}")
        return scorer


def _threads_of(plan: Plan) -> AbstractContextManager[None]:
    """Uses the plan's number of threads where it decides the last bits of a number."""
    if plan.fingerprint.get("model.device") != "cpu":
        return nullcontext()
    # Here, because only a reference that computes by torch needs it imported.
    from ...stages.model.reference import on_threads  # noqa: PLC0415

    return on_threads(plan.threads)


class _InFlight:
    """A shard in flight: its rows are shown as done in step with its batches, until it is kept."""

    commit: Future[Tally]  # once it is scored

    def __init__(self, progress: Progress, rows: int) -> None:
        self._progress, self._rows = progress, rows
        self._share, self._shown = 0.0, 0

    def add(self, batch: BatchDone) -> None:
        """Advances by the batch's share; a shard begun again never goes past its end."""
        self._share = min(self._share + batch.share, 1.0)
        more = int(self._share * self._rows) - self._shown
        self._shown += more
        self._progress.advance(more, tokens=batch.tokens, padding=batch.padding)

    def finished(self) -> Tally:
        """Its counts, once it is committed; the error that kept it from that."""
        tally = self.commit.result()
        more, self._shown = self._rows - self._shown, self._rows  # first: a signal may come here
        self._progress.advance(more)
        return tally
