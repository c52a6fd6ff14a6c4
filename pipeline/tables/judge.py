"""`align judge`: judges a table of samples, or measures a judge on gold pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from ...schemas.config import Config
from ...schemas.errors import CorruptionError, UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.samples import Sampler
from ...stages.judge.calibration import Calibration, comparison_shares, score_shares
from ...stages.judge.template import load_template
from ...stages.judge.verifiers import load_verifier
from ...stages.storage.tables import TableFolder, TableManifest, read_table
from ...stages.tracking.progress import Progress
from ..parts import Part
from ..work import CommandResult, working
from .judges import (
    Candidate,
    Columns,
    Judge,
    JudgeContext,
    JudgeCounts,
    PartsPending,
    candidates_of,
    read_gold,
)
from .language_judge import language_judge, require_language_model
from .samplers import require_local_answers
from .table_inputs import read_input

# Values of judge.by: judges with a language model, and checks without a model.
LANGUAGE = ("rubric", "pairwise")
CHECKS = ("exact", "regex", "function")


def open_judge(config: Config, columns: Sequence[str], sampler: Sampler | None = None) -> Judge:
    """The judge of the settings, for samples with these columns.

    `sampler` replaces the language model of the settings.
    """
    by = config.judge.by
    if by == "reward":
        from .reward_judge import reward_judge  # noqa: PLC0415 - it imports torch

        return reward_judge(config)
    if by in LANGUAGE:
        return language_judge(config, sampler)
    if by in CHECKS:
        return check_judge(config, columns)
    raise UsageError(
        "judge.by is not set. Name the judge by --by: reward, rubric, pairwise, exact, regex or "
        "function."
    )


def require_judge(config: Config) -> None:
    """Refuses wrong settings of the judge, before there are samples to judge."""
    options = config.judge
    if options.by in LANGUAGE:
        load_template(options.by, options.template)
        require_language_model(config)
    else:
        open_judge(config, [options.answer])


def check_judge(config: Config, columns: Sequence[str]) -> Judge:
    """A judge without a model; every process checks all samples, and no judgment is stored."""
    verify, identity = load_verifier(config.judge, columns)

    def scores(candidates: Sequence[Candidate], context: JudgeContext) -> Columns:
        context.progress.begin("checking", total=len(candidates), unit="samples")
        values = []
        for one in candidates:
            values.append(verify(one.row, one.text))
            context.progress.advance(1)
        context.progress.end()
        context.counts.new += len(values)
        return {"score": values}

    return Judge({"judge": digest(identity)}, scores)


def judge(
    config: Config,
    samples: str,
    *,
    progress: Progress,
    part: Part | None = None,
    sampler: Sampler | None = None,
) -> CommandResult[TableManifest, JudgeCounts]:
    """Judges a table of samples; stored judgments are reused.

    With several parts, each part that finds all judgments publishes the table. `sampler` replaces
    the language model of the settings.
    """
    # Read the samples and open the judge, which loads no weights yet.
    options = config.judge
    if options.against and options.by != "pairwise":
        raise UsageError(
            f"judge.against is for judge.by pairwise, and judge.by is {options.by}. Leave it out."
        )
    require_local_answers(part, options.output, options.answers, "judge.answers")
    if not sampler:
        require_judge(config)
    source = read_input(config, samples, "samples")
    candidates = candidates_of(source.table, samples)
    opened = open_judge(config, source.table.columns, sampler)

    # A finished table with the same inputs is the result, unless the judge refused questions.
    folder, counts = TableFolder.at(options.output, "judged"), JudgeCounts()
    made_from = {"samples": source.root, **opened.made_from}
    settings = {"by": options.by, **opened.settings}
    inputs = (made_from, settings, source.sampling)
    try:
        existing = read_table(folder)[0] if folder.stored() else None
    except CorruptionError:  # a damaged table is made again
        existing = None
    is_same = existing and (existing.made_from, existing.settings, existing.sampling) == inputs
    if existing and is_same and not existing.counts.get("questions_not_taken"):
        counts.known = existing.counts.get("judgments", existing.counts["judged"])
        lines = _lines(folder, existing, counts)
        return CommandResult(str(folder), existing, counts, lines, part, was_complete=True)

    with working(folder, "judge", config.tracking, part, name="judge", kept=counts.text) as run:
        run.log_params({f"judge.{name}": str(value) for name, value in settings.items()})
        run.log_dataset("samples", digest=source.root, source=samples, context="judging")
        try:
            columns = opened.columns(candidates, JudgeContext(run, progress, counts, part))
        except PartsPending:
            return CommandResult(str(folder), None, counts, (), part)
        finally:
            run.log_metrics({"judge/new": float(counts.new), "judge/known": float(counts.known)})
        table = source.table.with_columns(
            pl.Series(name, values, pl.Float64 if name == "score" else pl.Int64)
            for name, values in columns.items()
        )
        judged = table["score"].count()
        manifest = folder.publish(
            table,
            made_from=made_from,
            settings=settings,
            counts={
                **source.left_out,
                "judged": judged,
                "unjudged": table.height - judged,
                **counts.of_table,
            },
            sampling=source.sampling,
        )
        totals = {f"judge/{name}": float(count) for name, count in manifest.counts.items()}
        run.log_metrics({**totals, "judge/rows": float(manifest.rows)})
        # Tags name the folders as the user did, and the digests of everything that was read.
        folders = {"samples": samples, "against": options.against}
        tags = {f"align.{name}": given for name, given in folders.items() if given}
        for name, root in manifest.made_from.items():
            tags[f"align.{name}_root" if name in folders else f"align.{name}"] = root
        tags |= {"align.judged_root": manifest.root, "align.judged": str(folder)}
        run.set_tags(tags)
    lines = _lines(folder, manifest, counts)
    return CommandResult(str(folder), manifest, counts, lines, part, has_published=True)


def calibrate(
    config: Config, gold: str, *, progress: Progress, sampler: Sampler | None = None
) -> Calibration:
    """Measures a judge on gold pairs; its judgments are stored like those of samples."""
    config = replace(config, judge=replace(config.judge, against=""))
    options = config.judge
    require_local_answers(None, options.output, options.answers, "judge.answers")
    pairs, columns_of_data, left_out = read_gold(gold, config.data)
    opened = open_judge(config, columns_of_data, sampler)
    folder, counts = TableFolder.at(options.output, "judged"), JudgeCounts()
    with working(folder, "judge", config.tracking, None, name="judge", kept=counts.text) as run:
        context = JudgeContext(run, progress, counts)
        if opened.compare:
            shares = comparison_shares(opened.compare(pairs, context))
        else:
            scores = opened.columns([one for pair in pairs for one in pair], context)["score"]
            shares = score_shares(zip(scores[::2], scores[1::2], strict=True))
        measured = Calibration(options.by, len(pairs), left_out, shares, counts.of_table)
        run.log_metrics(measured.metrics())
    return measured


def _lines(folder: TableFolder, manifest: TableManifest, counts: JudgeCounts) -> tuple[str, ...]:
    """The summary for the terminal: samples with a score, judgments, comparisons and tokens."""
    totals = manifest.counts
    scored = f"{totals['judged']:,} of them with a score"
    lines = [f"{folder}: {counted(manifest.rows, 'samples')}, {scored}", counts.text()]
    if totals.get("comparisons"):
        lines.append(
            f"{counted(totals['comparisons'], 'comparisons')}: "
            f"{totals['comparisons_tied']:,} tied "
            f"({totals['comparisons_of_equal_texts']:,} of equal texts), "
            f"{totals['comparisons_refused']:,} refused"
        )
    if "refusals" in totals:
        lines.append(
            f"{counted(totals['judgments'], 'answers')} of the judge, "
            f"{totals['refusals']:,} without a verdict; "
            f"{totals['judge_prompt_tokens']:,} tokens read, "
            f"{totals['judge_completion_tokens']:,} written"
        )
    if totals.get("questions_not_taken"):
        refused = counted(totals["questions_not_taken"], "questions that the judge refuses")
        lines.append(f"{refused}; the same command asks them again")
    has_scores = bool(totals["judged"])
    lines.append(f"next: align select {folder}" if has_scores else "no sample has a score")
    return tuple(lines)
