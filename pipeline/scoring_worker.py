"""Scores the units of a plan, together with any number of other workers."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..schemas.cache import Plan
from ..schemas.rows import Reference, Scorer
from ..stages.pairing.kl_partners import CutRule
from ..stages.pairing.ring import Ring
from ..stages.pairing.units import build_unit
from ..stages.score.reuse import ReuseIndex
from ..stages.score.score import BatchDone, ScoringRules, UnitScores, score_unit
from ..stages.storage.commits import UnitFacts, commit_unit
from ..stages.storage.locks import UnitClaims
from .cache_compatibility import open_earlier
from .precompute_plan import Job, ring_of

if TYPE_CHECKING:
    from ..stages.tracking.journaled_run import Run
    from ..stages.tracking.progress import Progress


@dataclass(frozen=True)
class Worker:
    """The place of this process among those that share an output folder."""

    rank: int = 0
    world: int = 1
    joins: bool = False  # works with an owner instead of having to be the owner


@dataclass
class Tally:
    """Counts of the work of this process."""

    units: int = 0
    rows: int = 0
    scored: int = 0  # branches
    reused: int = 0  # branches
    tokens: int = 0  # run through the model, padding included
    padding: int = 0
    seconds: float = 0.0

    def add(self, rows: int, scores: UnitScores) -> None:
        """Counts one unit."""
        self.units += 1
        self.rows += rows
        self.scored += scores.branches - scores.reused
        self.reused += scores.reused
        self.tokens += scores.run_tokens
        self.padding += scores.padding

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


def score_units(
    job: Job, plan: Plan, worker: Worker, *, run_id: str, progress: Progress, run: Run
) -> Tally:
    """Returns once every unit of the plan has a commit, whichever worker made it."""
    started = time.perf_counter()
    scorer = _UnitScorer(job, plan, run_id, progress)
    units = range(len(plan.unit_offsets) - 1)
    order = sorted(units, key=lambda unit: unit % worker.world != worker.rank % worker.world)
    tally = Tally()
    by_others: list[int] = []
    progress.begin("scoring", total=plan.unit_offsets[-1], unit="rows")
    with UnitClaims(job.work.claims) as claims, _held_to_threads(job, plan):
        for unit in order:
            if claims.try_claim(unit):
                scorer.finish(unit, tally)
                claims.release(unit)
                tally.seconds = time.perf_counter() - started
                run.log_metrics(tally.metrics(), step=tally.units)
            else:
                by_others.append(unit)
        for unit in by_others:
            is_shown = False
            while not job.work.commit(unit).exists() and not job.is_published:
                claims.wait(unit)
                if claims.try_claim(unit):
                    scorer.finish(unit, tally)
                    claims.release(unit)
                    is_shown = True
            if not is_shown:
                progress.advance(plan.unit_offsets[unit + 1] - plan.unit_offsets[unit])
    progress.end()
    tally.seconds = time.perf_counter() - started
    return tally


def _held_to_threads(job: Job, plan: Plan) -> AbstractContextManager[None]:
    """Uses the plan's number of threads where it decides the last bits of a number."""
    if job.fingerprint.get("model.device") != "cpu":
        return nullcontext()
    # Here, because only a reference that computes by torch needs it imported.
    from ..stages.model.reference import on_threads  # noqa: PLC0415

    return on_threads(plan.threads)


@dataclass
class _UnitMeter:
    """Shows a unit's rows as done in step with its batches."""

    progress: Progress
    rows: int
    share: float = 0.0
    shown: int = 0

    def add(self, batch: BatchDone) -> None:
        """Advances by the batch's share; a unit begun again never goes past its end."""
        self.share = min(self.share + batch.share, 1.0)
        more = int(self.share * self.rows) - self.shown
        self.shown += more
        self.progress.advance(more, tokens=batch.tokens, padding=batch.padding)

    def close(self) -> None:
        """The unit is committed."""
        self.progress.advance(self.rows - self.shown)


@dataclass(frozen=True)
class _UnitScorer:
    """Scores the units of a plan; the ring, the model and earlier caches are opened when needed."""

    job: Job
    plan: Plan
    run_id: str
    progress: Progress

    def finish(self, unit: int, tally: Tally) -> None:
        """Scores and commits a unit, unless that is done."""
        start, stop = self.plan.unit_offsets[unit : unit + 2]
        if self.job.work.commit(unit).exists() or self.job.is_published:
            self.progress.advance(stop - start)
            return
        meter = _UnitMeter(self.progress, stop - start)
        unit_rows = build_unit(self.ring, start, stop, self.cut_rule)
        known = self.reuse.find(
            unit_rows.rows, first_key=unit_rows.first_key, last_key=unit_rows.last_key
        )
        scores = score_unit(
            unit_rows.rows, known, self.rules, scorer=self.scorer, on_batch=meter.add
        )
        numerics = dict(self.scorer().describe()) if scores.run_tokens else {}
        notes = {
            "mismatched_completions_replaced_after_cutting": unit_rows.replaced,
            "completions_scored_again_alone_in_float32": scores.rescored_in_float32,
        }
        facts = UnitFacts(
            first_key=unit_rows.first_key,
            last_key=unit_rows.last_key,
            tokens_per_batch=scores.tokens_per_batch,
            rejected=(*unit_rows.rejected, *scores.rejected),
            notes={name: count for name, count in notes.items() if count},
            numerics=numerics or known.numerics,
            input_names={entry.identity: entry.name for entry in self.plan.inputs},
        )
        commit_unit(self.job.work, self.run_id, unit, scores.block, facts)
        tally.add(stop - start, scores)
        meter.close()

    @cached_property
    def ring(self) -> Ring:
        """The ring that the plan was made from."""
        return ring_of(self.job)

    @cached_property
    def cut_rule(self) -> CutRule:
        """How mismatched completions are cut."""
        return CutRule(self.job.config.tokens.max_length, self.job.tokenizer.stops.tokens)

    @cached_property
    def reuse(self) -> ReuseIndex:
        """The scores of earlier caches."""
        earlier = open_earlier(self.plan.reuse, self.plan)
        return ReuseIndex(earlier, need_token_logps=self.rules.keep_token_logps)

    @cached_property
    def rules(self) -> ScoringRules:
        """How units are scored."""
        return ScoringRules(
            tokens_per_batch=self.job.config.scoring.tokens_per_batch,
            hidden_size=self.reference.hidden_size(),
            keep_token_logps=self.job.config.cache.token_logps,
        )

    @property
    def reference(self) -> Reference:
        """The reference model, not loaded."""
        return self.job.reference

    def scorer(self) -> Scorer:
        """The reference model, loaded once."""
        return self._scorer

    @cached_property
    def _scorer(self) -> Scorer:
        return self.reference.open()
