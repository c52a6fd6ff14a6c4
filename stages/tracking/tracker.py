"""The interface of a tracker, and the table of trackers.

All data is written to disk before a tracker gets it (`run_record.py`, `metrics_log.py`), so a
store that is down causes a warning and never stops a run.
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

# Tracker name -> module in this folder, whose TRACKER is imported when a run is recorded.
TRACKERS: dict[str, str] = {
    "mlflow": "mlflow_tracker",
    "tensorboard": "tensorboard_tracker",
    "wandb": "wandb_tracker",
}
MAIN = "mlflow"  # `tracking.uri` and `--uri` of mlflow-sync are its address


class Tracker:
    """One run in one store. All calls are idempotent, also across processes.

    A background thread makes the calls. If one raises, it is retried later, after `begin`.
    `__init__` imports the tracker's library but does not contact the store.
    """

    title = ""  # in messages
    named_by = ""  # the settings that `address_of` reads, for messages
    library = ""  # a required package, installed by the extra with the tracker's name
    experiment_variable = ""  # environment variable for an experiment that the settings lack
    # To silence the library: environment variables that are set unless the user has set them, and
    # packages whose log level becomes ERROR.
    environment: Mapping[str, str] = MappingProxyType({})
    noisy: tuple[str, ...] = ()

    def __init__(self, address: str) -> None:
        self.address = address

    @staticmethod
    def address_of(options: TrackingOptions, home: Path) -> str:
        """The store, from settings, environment and the run's folder; empty if there is none."""
        raise NotImplementedError

    @staticmethod
    def plain_address(address: str) -> str:
        """The address without secrets, as an absolute path if it is one."""
        return bare_address(address) if "://" in address else str(Path(address).absolute())

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether the store still has a run that was sent to it."""
        raise NotImplementedError

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Finds or creates the run, by its key if it has no id yet, and marks it as running.

        Returns its id and the offset in metrics.jsonl of the first line to send.
        """
        raise NotImplementedError

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """Sends lines of metrics.jsonl, in order."""
        raise NotImplementedError

    def label(self, facts: RunFacts) -> None:
        """Sends parameters, tags, data, models and status; called again after a change."""
        raise NotImplementedError

    def file(self, path: Path, folder: str) -> None:
        """Uploads a file or folder into `folder` of the run; replaces an earlier version."""

    def close(self, facts: RunFacts) -> None:
        """Called once everything of an ended run is sent."""


def tracker_of(name: str) -> type[Tracker]:
    """The tracker with this name, which may come from the record of another installation."""
    if name not in TRACKERS:
        raise UsageError(
            f"Unknown tracker {name!r:.60}. Set tracking.trackers to one or more of "
            f"{', '.join(TRACKERS)}, separated by commas."
        )
    module = import_module(f".{TRACKERS[name]}", __package__)
    return cast("type[Tracker]", module.TRACKER)


def tracker_names(options: TrackingOptions) -> list[str]:
    """The names of the trackers in use; MLflow if the settings name none."""
    named = [name.strip() for one in options.trackers for name in one.split(",")]
    return [*dict.fromkeys(named or ([MAIN] if options.mlflow else []))]


def require_trackers(options: TrackingOptions) -> None:
    """Refuses an unknown tracker, and one whose library is not installed."""
    for name in tracker_names(options):
        library = tracker_of(name).library
        spec = find_spec(library) if library else None
        # Without an origin it is a folder with the library's name, such as a run's wandb/.
        if library and (spec is None or spec.origin is None):
            raise UsageError(
                f"tracking.trackers: {name} needs the package {library}. Install it: "
                f"pip install 'align-cached-reference[{name}]'"
            )
    if MAIN in tracker_names(options) and not options.mlflow:
        raise UsageError(
            f"tracking.trackers names {MAIN}, but tracking.mlflow is false. Remove one of them."
        )


def addresses(options: TrackingOptions, home: Path) -> Mapping[str, str]:
    """The address of each tracker in use, for a run in this folder."""
    require_trackers(options)
    found = {name: tracker_of(name).address_of(options, home) for name in tracker_names(options)}
    for name, address in found.items():
        if not address:
            raise UsageError(
                f"tracking.trackers: {name} has no address. Set it ({tracker_of(name).named_by}), "
                "or remove the tracker."
            )
    return found


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silences a tracker's library in all threads while the block runs.

    Only the main thread may use it, before the library is imported, because warning filters belong
    to the whole process.
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
    """The value as a number or a bool if it is one, because trackers plot and compare those."""
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,14})", text):  # JavaScript rounds longer integers
        return int(text)
    if re.fullmatch(r"-?(0|[1-9][0-9]*)([.][0-9]+)?(e[-+]?[0-9]+)?", text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text
