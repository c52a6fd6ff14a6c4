"""`rounds.html`: all rounds on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...schemas.errors import counted
from ...schemas.round_record import Answering, HeldOut, RoundRecord
from ...stages.report.charts import Point, Series, chart
from ...stages.report.html_page import render_page
from ...stages.storage.tables import TableFolder, read_table
from ..options.settings import without_secrets
from .rounds_evaluation import text_of
from .rounds_plan import RoundsJob
from .rounds_result import HEAD, LOG_RATIO, first_row, row_of, unjudged

PROMPTS_SHOWN = 12
MEASURED_NOTE = (
    "Bounds of a win rate: 95 % of draws of as many prompts with replacement. A tie counts half. "
    "Round 0 is the model of the beginning."
)
TRAINED_NOTE = (
    "From the last logged step of each training. The log-ratio is log(policy / reference), the "
    "mean over the completions of that step, which the policy before has sampled."
)


def rounds_page(job: RoundsJob, finished: Sequence[RoundRecord]) -> str:
    """The page of the finished rounds."""
    names = dict.fromkeys(name for one in finished for name, count in one.counts.items() if count)
    counts = [
        [name, *(f"{one.counts[name]:,}" if name in one.counts else "-" for one in finished)]
        for name in names
    ]
    answer_head, answers = _answers(job, finished)
    return render_page(
        "rounds.html.j2",
        title=f"Rounds: {job.folder.root.resolve().name}",
        sentences=list(_sentences(job, finished)),
        measured=_measured(finished),
        measured_note=MEASURED_NOTE,
        trained=_trained(finished),
        trained_note=TRAINED_NOTE,
        head=HEAD,
        rows=[row for row in (first_row(finished), *map(row_of, finished)) if row],
        links=_links(job, finished),
        count_head=["", *(f"round {record.number}" for record in finished)],
        counts=counts,
        answer_head=answer_head,
        answers=answers,
        lineage=dict(_lineage(finished)),
        settings=without_secrets(job.bound_settings()),
    )


def _sentences(job: RoundsJob, finished: Sequence[RoundRecord]) -> Iterator[str]:
    config = job.config
    prompts = f"{counted(len(job.split.train), 'prompts')}, {len(job.split.held_out):,} held out"
    yield (
        f"{job.recipe.name}, {len(finished)} of {counted(config.rounds.count, 'rounds')}, "
        f"reference {config.rounds.reference}, judged by {config.judge.by}; {prompts}."
    )
    yield from (f"{line}." for line in unjudged(finished))


def _measured(finished: Sequence[RoundRecord]) -> str:
    measured = [(record.number, record.held_out) for record in finished if record.held_out]

    def line(name: str, of: Callable[[HeldOut], float], color: str) -> Series:
        return Series(
            name, [(number, of(held_out)) for number, held_out in measured], color, "dots"
        )

    def policies(name: str, of: Callable[[Answering], float | None], color: str) -> Series:
        answering = [(0, measured[0][1].first)] if measured else []
        answering += [(number, held_out.policy) for number, held_out in measured]
        known = [(number, of(one)) for number, one in answering]
        points: list[Point] = [(number, value) for number, value in known if value is not None]
        return Series(name, points, color, "dots")

    charts = {
        "Win rate": [
            line("against the policy before", lambda one: one.against_previous.rate, "c0"),
            line("low", lambda one: one.against_previous.low, "c5"),
            line("high", lambda one: one.against_previous.high, "c5"),
            line("against the beginning", lambda one: one.against_first.rate, "c1"),
        ],
        "Mean score": [policies("score", lambda one: one.mean_score, "c2")],
        "Mean length, tokens": [policies("tokens", lambda one: one.mean_tokens, "c3")],
        "Repeated 4-grams of words, share": [policies("repeated", lambda one: one.repeated, "c4")],
    }
    return "".join(chart(title, series, x_label="round") for title, series in charts.items())


def _trained(finished: Sequence[RoundRecord]) -> str:
    charts = {
        "KL: mean log-ratio": (LOG_RATIO,),
        "KL: of mismatched completions": ("kl/raw",),
        "KL: of tokens": ("kl/tokens",),
        "Loss": ("loss",),
        "Accuracy": ("rewards/accuracies", "rewards/ties"),
        "Margin": ("rewards/margins",),
    }
    return "".join(
        chart(
            title,
            [
                Series(name, _points(finished, name), f"c{index}", "dots")
                for index, name in enumerate(names)
            ],
            x_label="round",
        )
        for title, names in charts.items()
    )


def _points(finished: Sequence[RoundRecord], name: str) -> list[Point]:
    return [(one.number, one.trained[name]) for one in finished if name in one.trained]


def _links(job: RoundsJob, finished: Sequence[RoundRecord]) -> dict[str, str]:
    """The report of each training, beside its round's number."""
    reports = {str(one.number): job.folder.round(one.number).run.report for one in finished}
    root = job.folder.root
    return {name: str(path.relative_to(root)) for name, path in reports.items() if path.exists()}


def _lineage(finished: Sequence[RoundRecord]) -> Iterator[tuple[str, str]]:
    for record in finished:
        for name, value in record.made_from.items():
            yield f"round {record.number} from {name}", value
        for name, value in record.made.items():
            yield f"round {record.number}: {name}", value


def _answers(job: RoundsJob, finished: Sequence[RoundRecord]) -> tuple[list[str], list[list[str]]]:
    """Names of the policies, and for each of the first held-out prompts a sample of each."""
    measured = [record.number for record in finished if record.held_out]
    if not measured or not job.config.rounds.show_text:
        return [], []
    folders = {"beginning": job.folder.first_samples}
    folders |= {f"round {one}": job.folder.round(one).eval_samples for one in measured}
    tables = [_first_samples(folder) for folder in folders.values()]
    rows = [
        [_said(prompt.text), *(table.get(prompt.key, "") for table in tables)]
        for prompt in job.split.held_out[:PROMPTS_SHOWN]
    ]
    return ["prompt", *folders], rows


def _first_samples(folder: Path) -> dict[str, str]:
    table = read_table(TableFolder(folder, "samples"))[1]
    rows = table.select("prompt_key", "number", "completion").iter_rows()
    return {key: text_of(completion) for key, number, completion in rows if number == 0}


def _said(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)
