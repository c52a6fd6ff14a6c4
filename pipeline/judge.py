"""Judges samples, or only measures a judge on pairs of known preference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..schemas.config import Config
from ..schemas.errors import CorruptionError, UsageError, counted
from ..schemas.samples import Sampler
from ..schemas.table_manifest import TableManifest
from ..stages.judge.calibration import Calibration, of_comparisons, of_scores
from ..stages.judge.judged_rows import (
    SampleRows,
    standings_of,
    with_scores,
    with_standings,
)
from ..stages.judge.judgments import pairs_against, pairs_within
from ..stages.storage.locks import owner_lock
from ..stages.storage.objects import Location
from ..stages.storage.tables import TableFolder, read_table
from ..stages.tracking.journaled_run import Run
from ..stages.tracking.progress import Progress
from .executors.executor import Share
from .judge_inputs import read_gold, sample_rows
from .judges import JudgeOutcome, Pairs, RowJudge, compare, require_judge, row_judge
from .language_judge import JudgeModel, Work, judge_model, with_template
from .recorded_work import recorded_work
from .table_inputs import TableInput, read_input

if TYPE_CHECKING:
    import polars as pl


def judge(
    config: Config,
    samples: str,
    *,
    progress: Progress,
    share: Share | None = None,
    sampler: Sampler | None = None,
) -> JudgeResult:
    """Judges a table of samples; what was judged before is not judged again.

    Of several parts, each that finds all judgments there publishes the table. `sampler` stands for
    the language model that the settings would name.
    """
    call = _opened(config, samples, share, sampler)
    if manifest := call.published():
        known = manifest.counts.get("judgments", manifest.counts["judged"])
        return JudgeResult(call.folder.root, manifest, 0, known, share)
    call.folder.prepare()
    with _working(config, call.folder, share) as run:
        work = Work(call.folder.answers(config.judge.answers), run, progress, share)
        judged = call.judged(work)
        manifest = None
        if judged.found is not None:
            manifest = call.publish(judged.found, judged.counts)
        _record(run, call, manifest, judged)
    return JudgeResult(call.folder.root, manifest, judged.new, judged.known, share)


@dataclass(frozen=True)
class JudgeResult:
    """The table of judged samples, if no part is missing, and what this process did for it."""

    folder: Location
    manifest: TableManifest | None
    new: int
    known: int
    share: Share | None = None

    def text(self) -> str:
        """A summary of a few lines."""
        done = f"{counted(self.new, 'judgments')} made, {self.known:,} known before"
        if self.manifest is None:
            return (
                f"part {self.share} of {self.folder} is done: {done}\nwhichever part is the last "
                "completes the table; if one does not end, the same command without --part does "
                "what is missing"
            )
        counts = self.manifest.counts
        scored = f"{counts['judged']:,} of them with a score"
        lines = [f"{self.folder}: {counted(self.manifest.rows, 'samples')}, {scored}", done]
        if counts.get("comparisons"):
            lines.append(
                f"{counted(counts['comparisons'], 'comparisons')}: "
                f"{counts['comparisons_tied']:,} tied, of these "
                f"{counts['comparisons_of_equal_texts']:,} of equal texts; "
                f"{counts['comparisons_refused']:,} refused"
            )
        if "refusals" in counts:
            lines.append(
                f"{counted(counts['judgments'], 'answers')} of the judge, "
                f"{counts['refusals']:,} without a verdict; "
                f"{counts['judge_prompt_tokens']:,} tokens read, "
                f"{counts['judge_completion_tokens']:,} written"
            )
        if counts.get("questions_not_taken"):
            untaken = counted(counts["questions_not_taken"], "questions that the judge cannot take")
            lines.append(f"{untaken}, such as one longer than its context; asked again next time")
        if counts["judged"]:
            return "\n".join([*lines, f"next: align select {self.folder}"])
        return "\n".join([*lines, "no sample has a score, so there is nothing to select"])


def calibrate(
    config: Config, gold: str, *, progress: Progress, sampler: Sampler | None = None
) -> Calibration:
    """Measures a judge on pairs of known preference; its judgments are kept as any others."""
    require_judge(config, None, has_sampler=sampler is not None)
    pairs = read_gold(gold, config.data)
    model = _model(config, sampler)
    alone = None
    if not (model and config.judge.by == "pairwise"):
        alone = row_judge(config, pairs.samples.columns, model)
    folder = TableFolder.at(config.judge.output, "judged")
    folder.prepare()
    with _working(config, folder, None) as run:
        work = Work(folder.answers(config.judge.answers), run, progress)
        if alone is None:
            assert model
            compared = compare(model, pairs.pairs, work)
            shares = of_comparisons([one for *_, one in compared.found or ()])
            counts = compared.counts
        else:
            outcome = alone.score(pairs.samples, work)
            scores, counts = outcome.found or {}, outcome.counts
            keyed = [[(one.prompt_key, one.number) for one in pair] for pair in pairs.pairs]
            shares = of_scores((scores.get(first), scores.get(second)) for first, second in keyed)
        measured = Calibration(config.judge.by, len(pairs.pairs), pairs.left_out, shares, counts)
        run.log_metrics(measured.metrics())
    return measured


@dataclass(frozen=True)
class _Call:
    """What one call judges, by which judge, and where."""

    config: Config
    named: str  # the samples, as the user names them
    source: TableInput
    table: pl.DataFrame
    samples: SampleRows
    folder: TableFolder
    pairwise: JudgeModel | None  # None: each sample gets a score of its own
    alone: RowJudge | None
    against: tuple[TableManifest, SampleRows] | None

    @property
    def made_from(self) -> dict[str, str]:
        """Digests of all that the judgments follow from."""
        judge = self.pairwise or self.alone
        assert judge
        others = {"against": self.against[0].root} if self.against else {}
        return {"samples": self.source.root, **others, **judge.made_from}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the table depends on."""
        options = self.config.judge
        pairs = {"pairs": options.pairs} if self.pairwise and not self.against else {}
        asked = {"max_new_tokens": options.max_new_tokens}
        return {"by": options.by, **pairs, **(asked if options.by in LANGUAGE else {})}

    def published(self) -> TableManifest | None:
        """The manifest, if the table of this very call is whole."""
        if not self.folder.manifest.is_file():
            return None
        try:
            manifest, _ = read_table(self.folder)
        except CorruptionError:  # it is made again
            return None
        is_whole = not manifest.counts.get("questions_not_taken")  # these are asked again
        is_same = (manifest.made_from, manifest.settings, manifest.sampling) == (
            *(self.made_from, self.settings),
            self.source.sampling,
        )
        return manifest if is_whole and is_same else None

    def judged(self, work: Work) -> JudgeOutcome[pl.DataFrame]:
        """The table with its scores."""
        if self.alone:
            scored = self.alone.score(self.samples, work)
            if scored.found is None:
                return JudgeOutcome(None, scored.new, scored.known)
            table = with_scores(self.table, self.samples, scored.found)
            return JudgeOutcome(table, scored.new, scored.known, scored.counts)
        assert self.pairwise
        compared = compare(self.pairwise, self._pairs(), work)
        if compared.found is None:
            return JudgeOutcome(None, compared.new, compared.known)
        standings = standings_of(self.samples, compared.found, both=not self.against)
        table = with_standings(self.table, self.samples, standings)
        return JudgeOutcome(table, compared.new, compared.known, compared.counts)

    def _pairs(self) -> Pairs:
        ours = self.samples.candidates
        if self.against:
            pairs = [*pairs_against(ours, self.against[1].candidates)]
            missing = f"{self.config.judge.against} has no sample of the same prompts and numbers."
        else:
            pairs = [*pairs_within(ours, only_first=self.config.judge.pairs == "first")]
            missing = "no prompt has two samples. Sample more, or name others by --against."
        if not pairs:
            raise UsageError(f"judge.by pairwise: there is nothing to compare: {missing}")
        return pairs

    def publish(self, table: pl.DataFrame, counts: Mapping[str, int]) -> TableManifest:
        """Writes the table and its manifest."""
        judged = table.height - table["score"].null_count()
        return self.folder.publish(
            table,
            made_from=self.made_from,
            settings=self.settings,
            counts={
                **self.source.left_out,
                "judged": judged,
                "unjudged": table.height - judged,
                **counts,
            },
            sampling=self.source.sampling,
        )


LANGUAGE = ("rubric", "pairwise")


def _opened(config: Config, samples: str, share: Share | None, sampler: Sampler | None) -> _Call:
    """Reads the samples, and finds the judge; loads no weights."""
    options = config.judge
    if options.against and options.by != "pairwise":
        raise UsageError("judge.against: only judge.by pairwise compares with other samples.")
    require_judge(config, share, has_sampler=sampler is not None)
    source = read_input(config, samples, "samples")
    table = source.table
    rows = sample_rows(table, samples)
    model = _model(config, sampler)
    against = None
    if options.against:
        other, others = read_table(TableFolder.at(options.against, "samples"))
        against = other, sample_rows(others, options.against)
    is_pairwise = options.by == "pairwise"
    return _Call(
        config,
        samples,
        source,
        table,
        rows,
        TableFolder.at(options.output, "judged"),
        model if is_pairwise else None,
        None if is_pairwise else row_judge(config, table.columns, model),
        against,
    )


def _model(config: Config, sampler: Sampler | None) -> JudgeModel | None:
    """The language model that judges; None where the judge is another one."""
    if config.judge.by not in LANGUAGE:
        return None
    return with_template(config, sampler) if sampler else judge_model(config)


@contextmanager
def _working(config: Config, folder: TableFolder, share: Share | None) -> Iterator[Run]:
    """Records the work in MLflow; a command without a part is alone in the folder."""
    with (
        nullcontext() if share else owner_lock(folder, "judge"),
        recorded_work(config.tracking, folder.local, "judge", is_alone=not share) as run,
    ):
        run.set_tags({"align.part": str(share)} if share else {})
        yield run


def _record(run: Run, call: _Call, made: TableManifest | None, judged: JudgeOutcome[Any]) -> None:
    """What MLflow is told of a table of judged samples."""
    run.log_params({f"judge.{name}": str(value) for name, value in call.settings.items()})
    run.log_dataset("samples", digest=call.source.root, source=call.named, context="judging")
    run.log_metrics({"judge/new": float(judged.new), "judge/known": float(judged.known)})
    if made:
        counts = {f"judge/{name}": float(count) for name, count in made.counts.items()}
        run.log_metrics({**counts, "judge/rows": float(made.rows)})
        folders = {"samples": call.named, "against": call.config.judge.against}
        tags = {f"align.{name}": place for name, place in folders.items() if place}
        for name, found in made.made_from.items():
            tags[f"align.{name}_root" if name in folders else f"align.{name}"] = found
        run.set_tags(
            {**tags, "align.judged_root": made.root, "align.judged": str(call.folder.root)}
        )
        run.log_artifact(call.folder.manifest)
