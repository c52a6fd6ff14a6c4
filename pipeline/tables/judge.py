"""Judges samples, or only measures a judge on pairs of known preference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from ...schemas.config import Config
from ...schemas.errors import CorruptionError, UsageError, counted
from ...schemas.samples import Drawing, Sampler
from ...schemas.table_manifest import TableManifest
from ...stages.judge.calibration import Calibration
from ...stages.storage.tables import TableFolder, read_table
from ...stages.tracking.progress import Progress
from ..parts import Part
from ..work import Made, working
from .judge_inputs import read_gold, sample_rows
from .judges import Judged, Judging, kind_of
from .samplers import require_kept
from .table_inputs import read_input

JudgeResult: TypeAlias = Made[TableManifest, Judged]


def judge(
    config: Config,
    samples: str,
    *,
    progress: Progress,
    part: Part | None = None,
    sampler: Sampler | None = None,
) -> JudgeResult:
    """Judges a table of samples; what was judged before is not judged again.

    Of several parts, each that finds all judgments there publishes the table. `sampler` stands for
    the language model that the settings would name.
    """
    # The judge, which loads no weights yet, and the samples.
    kind, options = kind_of(config.judge), config.judge
    if options.against and not kind.compares:
        raise UsageError("judge.against: only judge.by pairwise compares with other samples.")
    kind.require(config, has_sampler=sampler is not None)
    require_kept(part, options.output, options.answers, "judge.answers")
    source = read_input(config, samples, "samples")
    rows = sample_rows(source.table, samples)
    judge = kind.of(config, source.table.columns, sampler)

    folder, tally = TableFolder.at(options.output, "judged"), Judged()
    made_from = {"samples": source.root, **judge.made_from}
    settings = {"by": options.by, **judge.settings}
    if found := _finished(folder, made_from, settings, source.sampling):
        tally.known = found.counts.get("judgments", found.counts["judged"])
        lines = _lines(folder, found, tally)
        return Made(str(folder), found, tally, lines, part, was_complete=True)

    with working(folder, "judge", config.tracking, part, name="judge", kept=tally.text) as run:
        run.log_params({f"judge.{name}": str(value) for name, value in settings.items()})
        run.log_dataset("samples", digest=source.root, source=samples, context="judging")
        made = judge.judged(source.table, rows, Judging(run, progress, tally, part))
        run.log_metrics({"judge/new": float(tally.new), "judge/known": float(tally.known)})
        if made is None:
            return Made(str(folder), None, tally, (), part)
        judged = made.found.height - made.found["score"].null_count()
        manifest = folder.publish(
            made.found,
            made_from=made_from,
            settings=settings,
            counts={
                **source.left_out,
                "judged": judged,
                "unjudged": made.found.height - judged,
                **made.counts,
            },
            sampling=source.sampling,
        )
        counts = {f"judge/{name}": float(count) for name, count in manifest.counts.items()}
        run.log_metrics({**counts, "judge/rows": float(manifest.rows)})
        run.set_tags(_tags(folder, manifest, {"samples": samples, "against": options.against}))
    lines = _lines(folder, manifest, tally)
    return Made(str(folder), manifest, tally, lines, part, has_published=True)


def calibrate(
    config: Config, gold: str, *, progress: Progress, sampler: Sampler | None = None
) -> Calibration:
    """Measures a judge on pairs of known preference; its judgments are kept as any others."""
    config = replace(config, judge=replace(config.judge, against=""))
    kind, options = kind_of(config.judge), config.judge
    kind.require(config, has_sampler=sampler is not None)
    require_kept(None, options.output, options.answers, "judge.answers")
    pairs = read_gold(gold, config.data)
    judge = kind.of(config, pairs.samples.columns, sampler)
    folder, tally = TableFolder.at(options.output, "judged"), Judged()
    with working(folder, "judge", config.tracking, None, name="judge", kept=tally.text) as run:
        shares = judge.measured(pairs, Judging(run, progress, tally))
        made = Calibration(
            options.by, len(pairs.pairs), pairs.left_out, shares.found, shares.counts
        )
        run.log_metrics(made.metrics())
    return made


def _finished(
    folder: TableFolder,
    made_from: Mapping[str, str],
    settings: Mapping[str, Any],
    sampling: Drawing | None,
) -> TableManifest | None:
    """The table of this very call; one with questions that were not taken is made again."""
    if not folder.stored():
        return None
    try:
        manifest, _ = read_table(folder)
    except CorruptionError:  # it is made again
        return None
    is_whole = not manifest.counts.get("questions_not_taken")
    found = (manifest.made_from, manifest.settings, manifest.sampling)
    return manifest if is_whole and found == (made_from, settings, sampling) else None


def _tags(folder: TableFolder, manifest: TableManifest, named: Mapping[str, str]) -> dict[str, str]:
    """The tags of a run: the folders that it read, as they were named, and its lineage."""
    tags = {f"align.{name}": given for name, given in named.items() if given}
    for name, root in manifest.made_from.items():
        tags[f"align.{name}_root" if name in named else f"align.{name}"] = root
    return {**tags, "align.judged_root": manifest.root, "align.judged": str(folder)}


def _lines(folder: TableFolder, made: TableManifest, tally: Judged) -> tuple[str, ...]:
    """The number of samples with a score, and the judgments made for them."""
    counts = made.counts
    scored = f"{counts['judged']:,} of them with a score"
    lines = [f"{folder}: {counted(made.rows, 'samples')}, {scored}", tally.text()]
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
    following = f"next: align select {folder}"
    return (*lines, following if counts["judged"] else "no sample has a score to select by")
