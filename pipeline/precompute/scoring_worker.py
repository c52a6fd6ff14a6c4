"""Scores the units of a plan, in whichever process an executor chooses."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...schemas.cache import Plan
from ...schemas.errors import FingerprintError
from ...schemas.json_codec import digest
from ...schemas.rows import Reference, Scorer
from ...stages.data.shown_row import lines_of
from ...stages.pairing.fitted_partners import CutRule
from ...stages.pairing.ring import Ring
from ...stages.pairing.units import build_unit
from ...stages.score.reuse import ReuseIndex
from ...stages.score.score import BatchDone, ScoringRules, UnitScores, score_unit
from ...stages.storage.cache.cache_folder import WorkFolder
from ...stages.storage.cache.commits import UnitFacts, commit_unit
from ...stages.tracking.progress import Progress
from ..jobs.counts import Counts
from .cache_compatibility import open_earlier
from .precompute_plan import CacheJob, ring_of

ROWS_TRIED = 64  # of rows without a partner, before none is shown


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
    """The units of a plan as tasks; the reference travels without its weights."""

    work: WorkFolder
    plan: Plan
    ring: Ring
    reference: Reference
    cut_rule: CutRule
    tokens_per_batch: int
    keep_token_logps: bool
    run_id: str
    made_by: tuple[str, int]  # host and process

    name = "scoring"
    unit = "rows"
    is_input = False

    @staticmethod
    def of(job: CacheJob, plan: Plan, run_id: str) -> ScoreTasks:
        """The units of a plan whose ring is whole."""
        config = job.config
        return ScoreTasks(
            work=job.work,
            plan=plan,
            ring=ring_of(job),
            reference=job.reference,
            cut_rule=CutRule(config.tokens.max_length, job.tokenizer.stops.tokens),
            tokens_per_batch=config.scoring.tokens_per_batch,
            keep_token_logps=config.cache.token_logps,
            run_id=run_id,
            made_by=_this_process(),
        )

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The rows of each unit."""
        return [stop - start for start, stop in pairwise(self.plan.unit_offsets)]

    @cached_property
    def costs(self) -> Sequence[float]:
        """The tokens of each unit, its mismatched completions taken for as long as its own."""
        pages = self.ring.rows.directory
        completions = (1 + self.ring.num_pairs) * pages["completion_tokens"]
        tokens = np.cumsum(pages["prompt_tokens"] + completions)
        ends = np.interp(self.plan.unit_offsets, [0, *pages["row"]], [0, *tokens])
        costs: list[float] = np.diff(ends).tolist()
        return costs

    def is_committed(self, task: int) -> bool:
        """Whether a unit has its commit, or all have had one: then the plan is gone."""
        return self.work.commit(task).is_file() or not self.work.is_planned

    def open(self, progress: Progress) -> Callable[[int], Tally]:
        """Opens the ring, the model and earlier caches once a unit needs them."""
        if self.made_by != _this_process():
            self._require_same_reference()
        scorer = _UnitScorer(self, progress)

        def score(unit: int) -> Tally:
            with _held_to_threads(self.plan):
                return scorer.finish(unit)

        return score

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


def lines_of_first(tasks: ScoreTasks, job: CacheJob) -> Iterator[str]:
    """The model's input for the first row on the ring that has all of its branches.

    The lines hold text of the data: they are for who runs the command, and for no record of it.
    """
    for row in range(min(ROWS_TRIED, tasks.plan.unit_offsets[-1])):
        found = build_unit(tasks.ring, row, row + 1, tasks.cut_rule).rows
        if len(found):
            file = job.paths[int(found.file[0])].name
            yield from lines_of(
                found, job.tokenizer, file=file, prompt_side=job.config.tokens.prompt_side
            )
            return


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
    """Scores the units of a plan; the model and earlier caches are opened when needed."""

    tasks: ScoreTasks
    progress: Progress

    def finish(self, unit: int) -> Tally:
        """Scores and commits a unit."""
        tasks, plan = self.tasks, self.tasks.plan
        start, stop = plan.unit_offsets[unit : unit + 2]
        meter = _UnitMeter(self.progress, stop - start)
        unit_rows = build_unit(tasks.ring, start, stop, tasks.cut_rule)
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
            input_names={entry.identity: entry.name for entry in plan.inputs},
        )
        commit_unit(tasks.work, tasks.run_id, unit, scores.block, facts)
        meter.close()
        return Tally.of_unit(stop - start, scores)

    @cached_property
    def reuse(self) -> ReuseIndex:
        """The scores of earlier caches."""
        earlier = open_earlier(self.tasks.plan.reuse, self.tasks.plan)
        return ReuseIndex(earlier, need_token_logps=self.rules.keep_token_logps)

    @cached_property
    def rules(self) -> ScoringRules:
        """The scoring rules of units."""
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
