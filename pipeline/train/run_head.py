"""The head of a run's page: what was trained on what, when, how it ended, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.checkpoint import Ending
from ...schemas.errors import counted
from ...stages.methods.table import recipe_of
from ...stages.report.axes import plain
from ...stages.report.cache_tables import duration
from ...stages.storage.disk import fs
from ...stages.storage.disk.locks import is_owned
from ...stages.storage.run.run_folder import RunFolder
from ..jobs.signals import WAY_ON
from .run_history import History, curves

if TYPE_CHECKING:
    import polars as pl

STEP = re.compile(rb'^{"step": ([0-9]+), .*}$', re.MULTILINE)  # a whole line
HOW = {
    "finished": "finished",
    "time": "stopped by train.max_time",
    "signal": "stopped by a signal",
    "failed": "failed",
}


def head_facts(
    settings: Mapping[str, Any], history: History, *, model: str, data: str
) -> dict[str, str]:
    """What tells a run from others, by name; what is not known is left out."""
    options = recipe_of(settings["train.method"], method_options(settings)).values
    betas = {name: plain(value) for name, value in options.items() if name.endswith("beta")}
    first, last = history.times
    facts = {
        "model": model,
        "method": settings["train.method"],
        "data": data,
        "first step": f"{first:%Y-%m-%d %H:%M} UTC" if first else "",
        "duration": duration((last - first).total_seconds()) if first and last else "",
        "learning rate": plain(settings["train.lr"]),
        **betas,
        "rows in a step": f"{settings['train.batch_size']:,}",
    }
    return {name: value for name, value in facts.items() if value}


def method_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the method by their own names."""
    return {
        name.removeprefix("method."): value
        for name, value in settings.items()
        if name.startswith("method.")
    }


def sentences(
    folder: RunFolder, ending: Ending | None, history: History, method: str
) -> Iterator[str]:
    """How far the run came and how it ended."""
    how = HOW[ending.ending] if ending else "not finished"
    yield f"{method}, {counted(history.steps, 'steps')}, {how}."
    yield from ended_how(ending)
    for change in ending.changes if ending else ():
        yield f"Resumed with a change: {change}."
    if steps := _not_applied(folder, history.learned):
        shown = ", ".join(f"{step:,}" for step in steps[:10])
        more = f" and {len(steps) - 10:,} more" if len(steps) > 10 else ""
        yield f"NaN or infinity: steps {shown}{more} were not applied (nonfinite.jsonl)."


def ended_how(ending: Ending | None) -> Iterator[str]:
    """Sentences on an end before the last step, and on a model that is not the last step's."""
    if ending and ending.ending == "finished" and ending.reason:
        yield f"It ended before its {counted(ending.total_steps, 'steps')}: {ending.reason}."
    if ending and ending.model_step is not None:
        yield f"Its model is that of step {ending.model_step:,}, the best (train.write_best)."


def trouble(folder: RunFolder, ending: Ending | None, history: History) -> list[str]:
    """Of a run that is not finished: why, its last good step, and what to do."""
    if ending and ending.ending == "finished":
        return []
    if ending is None and is_owned(folder):
        return ["It is running, or a process still holds its folder."]
    return [*_why(ending, folder, history), *_way_on(ending, folder)]


def _why(ending: Ending | None, folder: RunFolder, history: History) -> Iterator[str]:
    if ending is None:
        yield (
            "No end was recorded: the run was killed (out of the machine's memory, by a scheduler, "
            "by kill -9), or its machine stopped."
        )
        yield f"The last step with a line is {history.steps:,}."
    elif ending.ending == "failed":
        yield ending.reason or "It failed; its log says why."
        failed, step = steps_in(folder.nonfinite), ending.step
        while step in failed:
            step -= 1
        yield f"The last good step is {step:,} of {ending.total_steps:,}."
    else:
        yield f"It stopped after step {ending.step:,} of {ending.total_steps:,}."


def _way_on(ending: Ending | None, folder: RunFolder) -> Iterator[str]:
    saved = folder.steps()
    if not saved:
        yield f"No checkpoint is there. {WAY_ON}: it begins again at the first step."
        return
    yield f"The last checkpoint is of step {saved[-1]:,}. {WAY_ON}: it goes on from there."
    if ending and ending.ending == "failed":
        yield (
            "It has to keep its settings for that. With another learning rate, dtype or batch "
            "size it is another run: give it an --output of its own."
        )


def _not_applied(folder: RunFolder, learned: pl.DataFrame) -> list[int]:
    """Steps that were not applied; one that was run again after a resume may have been."""
    failed = steps_in(folder.nonfinite)
    well = {step for step, value in curves(learned).get("step_applied", ()) if value == 1}
    return sorted(failed - well)


def steps_in(file: Path) -> set[int]:
    """The steps that a file with the rows of some of them names."""
    return {int(step) for step in STEP.findall(fs.read_bytes(file))} if file.exists() else set()
