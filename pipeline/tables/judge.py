"""Judges samples, or only measures a judge on pairs of known preference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from ...schemas.config import Config
from ...schemas.errors import CorruptionError, UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.samples import Sampler
from ...stages.judge.calibration import Calibration, of_comparisons, of_scores
from ...stages.judge.template import load_template
from ...stages.judge.verifiers import verifier_of
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
    OthersAreNotDone,
    candidates_of,
    read_gold,
)
from .language_judge import language_judge, require_language_model
from .samplers import require_kept
from .table_inputs import read_input

# The judges that ask a language model, and those that need none.
LANGUAGE = ("rubric", "pairwise")
CHECKS = ("exact", "regex", "function")


def open_judge(config: Config, columns: Sequence[str], sampler: Sampler | None = None) -> Judge:
    """The judge that the settings name, for samples with these columns.

    `sampler` stands for the language model that the settings would name.
    """
    by = config.judge.by
    if by == "reward":
        from .reward_judge import reward_judge  # noqa: PLC0415 - it imports torch

        return reward_judge(config)
    if by in LANGUAGE:
        return language_judge(config, sampler)
    if by in CHECKS:
        return check_judge(config, columns)
    raise UsageError("Name the judge by --by: reward, rubric, pairwise, exact, regex or function.")


def require_judge(config: Config) -> None:
    """Refuses what the settings alone get wrong, before there are samples to judge."""
    options = config.judge
    if options.by in LANGUAGE:
        load_template(options.by, options.template)
        require_language_model(config)
    else:
        open_judge(config, [options.answer])


def check_judge(config: Config, columns: Sequence[str]) -> Judge:
    """A check as a judge; every process checks every sample, and nothing is kept."""
    verify, identity = verifier_of(config.judge, columns)

    def scores(candidates: Sequence[Candidate], context: JudgeContext) -> Columns:
        context.progress.begin("checking", total=len(candidates), unit="samples")
        found = []
        for one in candidates:
            found.append(verify(one.row, one.text))
            context.progress.advance(1)
        context.progress.end()
        context.counts.new += len(found)
        return {"score": found}

    return Judge({"judge": digest(identity)}, scores)


def judge(
    config: Config,
    samples: str,
    *,
    progress: Progress,
    part: Part | None = None,
    sampler: Sampler | None = None,
) -> CommandResult[TableManifest, JudgeCounts]:
    """Judges a table of samples; what was judged before is not judged again.

    Of several parts, each that finds all judgments there publishes the table. `sampler` stands for
    the language model that the settings would name.
    """
    # The samples, and the judge, which loads no weights yet.
    options = config.judge
    if options.against and options.by != "pairwise":
        raise UsageError("judge.against: only judge.by pairwise compares with other samples.")
    require_kept(part, options.output, options.answers, "judge.answers")
    if not sampler:
        require_judge(config)
    source = read_input(config, samples, "samples")
    candidates = candidates_of(source.table, samples)
    opened = open_judge(config, source.table.columns, sampler)

    # A table of this very call; one with questions that the judge could not take is made again.
    folder, counts = TableFolder.at(options.output, "judged"), JudgeCounts()
    made_from = {"samples": source.root, **opened.made_from}
    settings = {"by": options.by, **opened.settings}
    wanted = (made_from, settings, source.sampling)
    found = _stored(folder)
    is_same = found and (found.made_from, found.settings, found.sampling) == wanted
    if found and is_same and not found.counts.get("questions_not_taken"):
        counts.known = found.counts.get("judgments", found.counts["judged"])
        lines = _lines(folder, found, counts)
        return CommandResult(str(folder), found, counts, lines, part, was_complete=True)

    with working(folder, "judge", config.tracking, part, name="judge", kept=counts.text) as run:
        run.log_params({f"judge.{name}": str(value) for name, value in settings.items()})
        run.log_dataset("samples", digest=source.root, source=samples, context="judging")
        try:
            columns = opened.columns(candidates, JudgeContext(run, progress, counts, part))
        except OthersAreNotDone:
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
        # The folders that were read, as they were named, and the lineage.
        named = {"samples": samples, "against": options.against}
        tags = {f"align.{name}": given for name, given in named.items() if given}
        for name, root in manifest.made_from.items():
            tags[f"align.{name}_root" if name in named else f"align.{name}"] = root
        own = {"align.judged_root": manifest.root, "align.judged": str(folder)}
        run.set_tags({**tags, **own})
    lines = _lines(folder, manifest, counts)
    return CommandResult(str(folder), manifest, counts, lines, part, has_published=True)


def calibrate(
    config: Config, gold: str, *, progress: Progress, sampler: Sampler | None = None
) -> Calibration:
    """Measures a judge on pairs of known preference; its judgments are kept as any others."""
    config = replace(config, judge=replace(config.judge, against=""))
    options = config.judge
    require_kept(None, options.output, options.answers, "judge.answers")
    pairs, columns_of_data, left_out = read_gold(gold, config.data)
    opened = open_judge(config, columns_of_data, sampler)
    folder, counts = TableFolder.at(options.output, "judged"), JudgeCounts()
    with working(folder, "judge", config.tracking, None, name="judge", kept=counts.text) as run:
        context = JudgeContext(run, progress, counts)
        if opened.compare:
            shares = of_comparisons(opened.compare(pairs, context))
        else:
            scores = opened.columns([one for pair in pairs for one in pair], context)["score"]
            shares = of_scores(zip(scores[::2], scores[1::2], strict=True))
        made = Calibration(options.by, len(pairs), left_out, shares, counts.of_table)
        run.log_metrics(made.metrics())
    return made


def _stored(folder: TableFolder) -> TableManifest | None:
    """The table as it is; none if it is damaged, so that it is made again."""
    try:
        return read_table(folder)[0] if folder.stored() else None
    except CorruptionError:
        return None


def _lines(folder: TableFolder, made: TableManifest, counts: JudgeCounts) -> tuple[str, ...]:
    """The number of samples with a score, and the judgments made for them."""
    totals = made.counts
    scored = f"{totals['judged']:,} of them with a score"
    lines = [f"{folder}: {counted(made.rows, 'samples')}, {scored}", counts.text()]
    if totals.get("comparisons"):
        lines.append(
            f"{counted(totals['comparisons'], 'comparisons')}: "
            f"{totals['comparisons_tied']:,} tied, of these "
            f"{totals['comparisons_of_equal_texts']:,} of equal texts; "
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
        untaken = counted(totals["questions_not_taken"], "questions that the judge refuses")
        lines.append(f"{untaken}; asked again next time")
    following = f"next: align select {folder}"
    return (*lines, following if totals["judged"] else "no sample has a score to select by")
