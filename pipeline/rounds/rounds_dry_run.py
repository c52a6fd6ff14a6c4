"""The plan of rounds: what exists already, and what each verb has still to pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.config import Config
from ...schemas.errors import counted
from ...schemas.round_record import RoundRecord
from ...schemas.samples import Prompt, sample_key
from ...schemas.table_manifest import TableManifest
from ...stages.report.cache_tables import grid
from ...stages.storage.answers import Answers
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.run.rounds_folder import OneRound
from ...stages.storage.tables import TableFolder
from ..tables.judges import kind_of
from ..tables.samplers import sampler_of, sampling_of
from .rounds_evaluation import stop_reason
from .rounds_plan import RoundsJob

HEAD = ("round", "verb", "exists", "to pay")
DONE = "nothing"


@dataclass(frozen=True)
class PlanLine:
    """One verb of one round."""

    round: int
    verb: str
    exists: str
    to_pay: str

    @property
    def cells(self) -> list[str]:
        """A line of the table."""
        return [str(self.round), self.verb, self.exists, self.to_pay]


@dataclass(frozen=True)
class RoundsPlan:
    """All verbs of all rounds."""

    folder: Path
    train_prompts: int
    held_out: int
    lines: tuple[PlanLine, ...]
    reason: str  # why there will be no more rounds, if there is a reason

    def text(self) -> str:
        """The plan as a table."""
        prompts = f"{counted(self.train_prompts, 'prompts')}, {self.held_out:,} held out"
        table = grid(HEAD, [line.cells for line in self.lines])
        return "\n".join([f"{self.folder}: {prompts}", *table, *filter(None, [self.reason])])


def plan_of(job: RoundsJob, finished: Sequence[RoundRecord]) -> RoundsPlan:
    """The plan of the rounds asked for; it loads no model and writes nothing."""
    options = job.config.rounds
    reason = next(filter(None, (stop_reason(record, options) for record in finished)), "")
    last = len(finished) if reason else max(options.count, len(finished))
    lines = [
        line
        for number in range(1, last + 1)
        for line in (
            [PlanLine(number, "all", "finished", DONE)]
            if number <= len(finished)
            else _lines(_Planned(job, job.folder.round(number), len(finished)))
        )
    ]
    train, held_out = len(job.split.train), len(job.split.held_out)
    return RoundsPlan(job.folder.root, train, held_out, tuple(lines), reason)


@dataclass(frozen=True)
class _Planned:
    """A round that is not finished."""

    job: RoundsJob
    one: OneRound
    finished: int

    @property
    def is_begun(self) -> bool:
        """Whether the policy that it samples from is there."""
        return self.one.number == self.finished + 1

    @property
    def samples(self) -> int:
        """Samples of its prompts."""
        return len(self.job.prompts(self.one.number)) * self.job.config.sample.n


def _lines(planned: _Planned) -> Iterator[PlanLine]:
    job, one = planned.job, planned.one
    number, samples = one.number, planned.samples
    config = job.sampling(job.policy(number - 1), job.prompt_file(one), one.samples)
    prompts = job.prompts(number)
    missing = _missing(job, config, prompts) if planned.is_begun else samples
    known = f"{samples - missing:,} of {samples:,} samples"
    yield PlanLine(number, "sample", known, _paid(missing, "samples"))
    judged = TableFolder(one.root / "judged", "judged").find()
    selected = TableFolder(one.root / "selected", "selected").find()
    judge = config.judge
    most = 0 if judged else kind_of(judge).most(judge, len(prompts), config.sample.n)
    yield PlanLine(number, "judge", _rows(judged), _most(most, "judgments"))
    yield PlanLine(number, "select", _rows(selected), DONE)
    cache = CacheFolder(one.cache)
    is_scored = cache.manifest.is_file()
    rows = f"{load_manifest(cache).rows:,} rows" if is_scored else "-"
    most = 0 if is_scored else _most_scores(job, selected, samples)
    yield PlanLine(number, "precompute-ref", rows, _most(most, "scores"))
    yield PlanLine(number, "train", *_training(one))
    if job.split.held_out:
        yield _evaluation(planned)


def _evaluation(planned: _Planned) -> PlanLine:
    job, one = planned.job, planned.one
    options, held_out = job.config.rounds, job.split.held_out
    policies = [job.first] if one.number == 1 else []
    first = [_missing(job, job.held_out_sampling(of, one.root), held_out) for of in policies]
    is_trained = planned.is_begun and job.policy_exists(one.number)
    config = job.held_out_sampling(job.policy(one.number), one.eval_samples)
    total = len(held_out) * options.eval_n
    samples = sum(first) + (_missing(job, config, held_out) if is_trained else total)
    compares = kind_of(job.config.judge).compares  # with the first policy, and with the one before
    each = 2 * min(one.number, 2) if compares else 1 + len(policies)
    to_pay = f"{_paid(samples, 'samples')}, {_most(total * each, 'judgments')}"
    exists = _rows(TableFolder(one.eval_samples, "samples").find(), "samples")
    return PlanLine(one.number, "evaluate", exists, to_pay)


def _missing(job: RoundsJob, config: Config, prompts: Sequence[Prompt]) -> int:
    """Samples that are in no answer yet."""
    sampler = sampler_of(config.model, config.tokens, config.server, config.scoring)
    identity, options = sampler.identity(), config.sample
    sampling = sampling_of(options)
    keys = (
        sample_key(prompt.key, number, sampling, identity)
        for prompt in prompts
        for number in range(options.n)
    )
    return len(Answers(job.folder.sample_answers).missing(keys))


def _most_scores(job: RoundsJob, selected: TableManifest | None, samples: int) -> int:
    """Completions to score, mismatched ones included; equal ones count once when it is done."""
    rows = job.config.select.rows
    own = samples
    if rows == "best_worst":
        own = min(samples, 2 * (selected.rows if selected else samples // job.config.sample.n))
    elif rows == "labels" and selected:
        own = selected.rows
    return own * (1 + job.config.cache.kl_pairs)


def _training(one: OneRound) -> tuple[str, str]:
    run = one.run
    if run.model.exists():
        return "finished", DONE
    steps = run.steps()
    return (f"step {steps[-1]:,}" if steps else "-", "a training")


def _rows(found: TableManifest | None, what: str = "rows") -> str:
    return counted(found.rows, what) if found else "-"


def _paid(count: int, things: str) -> str:
    return counted(count, things) if count else DONE


def _most(count: int, things: str) -> str:
    return f"at most {counted(count, things)}" if count else DONE
