"""Trackers: what each does for a run, and the table of those that there are.

All that a tracker is given is on disk first (`run_record.py`, `metrics_log.py`), so a store that
is down costs a warning, never a run.
"""

from __future__ import annotations

import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import cast

from ...schemas.config import TrackingOptions
from ...schemas.errors import UsageError
from ...schemas.safe_text import bare_address
from .metrics_log import MetricsLine
from .run_record import RunFacts, Sent

# Each by its name and its file here, whose TRACKER is imported when a run is recorded.
TRACKERS: dict[str, str] = {
    "mlflow": "mlflow_tracker",
    "tensorboard": "tensorboard_tracker",
    "wandb": "wandb_tracker",
}
MAIN = "mlflow"  # whose address `tracking.uri` is, and `--uri` of mlflow-sync


class Tracker:
    """One run in one store. A call that is repeated, by this or a later process, adds nothing.

    A thread makes the calls; one that raises is made again later, after `begin`. Importing its
    file imports no library; `__init__` imports it, and asks the store nothing.
    """

    title = ""  # in messages
    named_by = ""  # the settings that `address_of` reads, for messages
    library = ""  # a package that must be installed; the extra of the tracker's name has it
    experiment_variable = ""  # names the experiment where the settings do not
    # To keep the library quiet: variables that are set unless the user has set them, and
    # packages that log and warn of nothing but errors.
    environment: Mapping[str, str] = MappingProxyType({})
    noisy: tuple[str, ...] = ()

    def __init__(self, address: str) -> None:
        self.address = address

    @staticmethod
    def address_of(options: TrackingOptions, home: Path) -> str:
        """The store, by settings, environment and the run's folder; empty: there is none."""
        raise NotImplementedError

    @staticmethod
    def plain_address(address: str) -> str:
        """The address without secrets, and the same from every folder."""
        return bare_address(address) if "://" in address else str(Path(address).absolute())

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether the store still has a run that it was sent."""
        raise NotImplementedError

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Finds or makes the run, by its key if it has no id yet, and sets it running.

        Returns its id and the offset in metrics.jsonl from which lines are to be sent.
        """
        raise NotImplementedError

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """Lines of metrics.jsonl, in their order."""
        raise NotImplementedError

    def label(self, facts: RunFacts) -> None:
        """Parameters, tags, data, models and the status; called again when one has changed."""
        raise NotImplementedError

    def file(self, path: Path, folder: str) -> None:
        """A file or a folder, into this folder of the run, in place of an earlier one."""

    def close(self, facts: RunFacts) -> None:
        """The end: the store has all of an ended run."""


def tracker_of(name: str) -> type[Tracker]:
    """The tracker of that name; a record of another install may name one that is not here."""
    if name not in TRACKERS:
        raise UsageError(
            f"{name!r:.60} is none of the trackers here: {', '.join(TRACKERS)}. Name one of them "
            "in tracking.trackers, or several with commas between."
        )
    module = import_module(f".{TRACKERS[name]}", __package__)
    return cast("type[Tracker]", module.TRACKER)


def wanted(options: TrackingOptions) -> list[str]:
    """The names of the trackers in use, MLflow where none is named."""
    named = [name.strip() for one in options.trackers for name in one.split(",")]
    return [*dict.fromkeys(named or ([MAIN] if options.mlflow else []))]


def require_trackers(options: TrackingOptions) -> None:
    """Refuses an unknown tracker, and one whose library is not installed."""
    for name in wanted(options):
        library = tracker_of(name).library
        spec = find_spec(library) if library else None
        # A folder of that name, as a run may have one here, looks like a package without a file.
        if library and (spec is None or spec.origin is None):
            raise UsageError(
                f"tracking.trackers: {name} needs the package {library}. Install it: "
                f"pip install 'align-cached-reference[{name}]'"
            )
    if MAIN in wanted(options) and not options.mlflow:
        raise UsageError(
            f"tracking.trackers names {MAIN}, and tracking.mlflow is false. Leave out one of them."
        )


def addresses(options: TrackingOptions, home: Path) -> Mapping[str, str]:
    """The address of each tracker in use, for a run that belongs to this folder."""
    require_trackers(options)
    found = {name: tracker_of(name).address_of(options, home) for name in wanted(options)}
    for name, address in found.items():
        if not address:
            raise UsageError(
                f"tracking.trackers: {name} has no address ({tracker_of(name).named_by}). Set it, "
                "or leave the tracker out."
            )
    return found


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Keeps a tracker's library quiet while the block runs, in every thread.

    The thread that works enters and leaves it, before the import: filters of warnings belong to
    the whole process.
    """
    tracker = tracker_of(name)
    unset = [one for one in tracker.environment if one not in os.environ]
    loggers = [one for one in map(logging.getLogger, tracker.noisy) if one.level == logging.NOTSET]
    with warnings.catch_warnings():
        for package in tracker.noisy:
            warnings.filterwarnings("ignore", module=package)
        os.environ.update({one: tracker.environment[one] for one in unset})
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger in loggers:
                logger.setLevel(logging.NOTSET)
            for one in unset:
                os.environ.pop(one, None)


def typed(text: str) -> str | float | bool:
    """A setting as a number or a bool where it is one: trackers plot and compare those."""
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,14})", text):  # longer ones JavaScript rounds
        return int(text)
    if re.fullmatch(r"-?(0|[1-9][0-9]*)([.][0-9]+)?(e[-+]?[0-9]+)?", text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text
