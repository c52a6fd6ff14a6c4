"""Judges samples, or only measures a judge on pairs of known preference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ...schemas.config import Config
from ...schemas.errors import CorruptionError, UsageError, counted
from ...schemas.samples import Sampler
from ...schemas.table_manifest import TableManifest
from ...stages.judge.calibration import Calibration
from ...stages.judge.judged_rows import SampleRows
from ...stages.storage.tables import TableFolder, read_table
from ...stages.tracking.journaled_run import Run
from ...stages.tracking.progress import Progress
from ..executors.executor import Share
from ..jobs.job import Call, Made, carry_out
from .answer_tasks import in_this_process, require_kept
from .judge_inputs import Gold, read_gold, sample_rows
from .judges import Judge, Judged, kind_of
from .table_inputs import TableInput, read_input

JudgeResult: TypeAlias = Made[TableManifest, Judged]


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
    return carry_out(_opened(in_this_process(config), samples, share, sampler), progress=progress)


def calibrate(
    config: Config, gold: str, *, progress: Progress, sampler: Sampler | None = None
) -> Calibration:
    """Measures a judge on pairs of known preference; its judgments are kept as any others."""
    alone = replace(in_this_process(config), judge=replace(config.judge, against=""))
    kind = kind_of(alone.judge)
    kind.require(alone, has_sampler=sampler is not None)
    require_kept(None, alone.judge.output, alone.judge.answers, "judge.answers")
    pairs = read_gold(gold, alone.data)
    judge = kind.of(alone, pairs.samples.columns, sampler)
    return carry_out(CalibrationJob(config=alone, gold=pairs, judge=judge), progress=progress).whole


@dataclass(frozen=True, kw_only=True)
class JudgingJob:
    """A judge at work; its judgments are kept in the output folder, or where settings say."""

    config: Config
    judge: Judge
    tally: Judged = field(default_factory=Judged)

    stage = run_name = "judge"

    @property
    def folder(self) -> TableFolder:
        """The folder of the table, where judgments are kept too."""
        return TableFolder.at(self.config.judge.output, "judged")

    @property
    def device(self) -> str:
        """The device of the judge."""
        return self.judge.device


@dataclass(frozen=True, kw_only=True)
class JudgeJob(JudgingJob):
    """One call's samples, and the table that is made of them."""

    named: str  # the samples, as the user names them
    source: TableInput
    samples: SampleRows
    share: Share | None

    noun = "table"

    @property
    def made_from(self) -> dict[str, str]:
        """Digests of all that the judgments follow from."""
        return {"samples": self.source.root, **self.judge.made_from}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the table depends on."""
        return {"by": self.config.judge.by, **self.judge.settings}

    def finished(self, *, is_prepared: bool) -> TableManifest | None:
        """The manifest, if the table of this very call is whole."""
        if not self.folder.file.is_file():
            return None
        try:
            manifest, _ = read_table(self.folder)
        except CorruptionError:  # it is made again
            return None
        is_whole = not manifest.counts.get("questions_not_taken")  # these are asked again
        made = (manifest.made_from, manifest.settings, manifest.sampling)
        is_same = made == (self.made_from, self.settings, self.source.sampling)
        if not (is_whole and is_same):
            return None
        self.tally.known = manifest.counts.get("judgments", manifest.counts["judged"])
        return manifest

    def make(self, call: Call[Judged]) -> TableManifest | None:
        """Judges the unjudged samples, and publishes the table if no part is missing."""
        found = self.judge.judged(self.source.table, self.samples, call)
        run = call.run
        run.log_params({f"judge.{name}": str(value) for name, value in self.settings.items()})
        run.log_dataset("samples", digest=self.source.root, source=self.named, context="judging")
        new, known = float(self.tally.new), float(self.tally.known)
        run.log_metrics({"judge/new": new, "judge/known": known})
        if found is None:
            return None
        judged = found.found.height - found.found["score"].null_count()
        manifest = self.folder.publish(
            found.found,
            made_from=self.made_from,
            settings=self.settings,
            counts={
                **self.source.left_out,
                "judged": judged,
                "unjudged": found.found.height - judged,
                **found.counts,
            },
            sampling=self.source.sampling,
        )
        call.has_published = True
        self._record(run, manifest)
        return manifest

    def _record(self, run: Run, made: TableManifest) -> None:
        """Logs the metrics and tags of a table of judged samples."""
        counts = {f"judge/{name}": float(count) for name, count in made.counts.items()}
        run.log_metrics({**counts, "judge/rows": float(made.rows)})
        folders = {"samples": self.named, "against": self.config.judge.against}
        tags = {f"align.{name}": folder for name, folder in folders.items() if folder}
        for name, found in made.made_from.items():
            tags[f"align.{name}_root" if name in folders else f"align.{name}"] = found
        judged = {"align.judged_root": made.root, "align.judged": str(self.folder.root)}
        run.set_tags({**tags, **judged})

    def lines(self, made: TableManifest, *, was_complete: bool) -> list[str]:
        """The number of samples with a score, and the judgments made for them."""
        counts = made.counts
        scored = f"{counts['judged']:,} of them with a score"
        lines = [f"{self.folder.root}: {counted(made.rows, 'samples')}, {scored}"]
        lines.append(self.tally.text())
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
            return [*lines, f"next: align select {self.folder.root}"]
        return [*lines, "no sample has a score, so there is nothing to select"]


@dataclass(frozen=True, kw_only=True)
class CalibrationJob(JudgingJob):
    """A judge, measured; beside its judgments nothing is kept."""

    gold: Gold

    noun = "calibration"
    share = None

    def finished(self, *, is_prepared: bool) -> None:
        """It is measured each time, of judgments that may be known."""

    def make(self, call: Call[Judged]) -> Calibration:
        """Judges both sides of each pair."""
        shares = self.judge.measured(self.gold, call)
        measured = Calibration(
            self.config.judge.by,
            len(self.gold.pairs),
            self.gold.left_out,
            shares.found,
            shares.counts,
        )
        call.run.log_metrics(measured.metrics())
        return measured

    def lines(self, made: Calibration, *, was_complete: bool) -> list[str]:
        """Its table."""
        return made.text().splitlines()


def _opened(config: Config, samples: str, share: Share | None, sampler: Sampler | None) -> JudgeJob:
    """Reads the samples, and finds the judge; loads no weights."""
    kind = kind_of(config.judge)
    if config.judge.against and not kind.compares:
        raise UsageError("judge.against: only judge.by pairwise compares with other samples.")
    kind.require(config, has_sampler=sampler is not None)
    require_kept(share, config.judge.output, config.judge.answers, "judge.answers")
    source = read_input(config, samples, "samples")
    rows = sample_rows(source.table, samples)
    judge = kind.of(config, source.table.columns, sampler)
    return JudgeJob(
        config=config, named=samples, source=source, samples=rows, judge=judge, share=share
    )
