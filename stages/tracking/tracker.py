"""Trackers: the facts they record of a run, their interface, and the known ones.

The numbers of a run reach it as lines of the run's journal, all else as the record beside it. Both
are on disk before a tracker gets them, so a store that is down costs a warning, never a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from ...schemas.config import TrackingOptions
from ...schemas.errors import StorageError, UsageError
from ...schemas.safe_text import bare_address, redacted
from .journal import Entry

# Each by its name and its file here, whose KIND is imported when a run is recorded.
TRACKERS: dict[str, str] = {
    "mlflow": "mlflow_tracker",
    "tensorboard": "tensorboard_tracker",
    "wandb": "wandb_tracker",
}
MAIN = "mlflow"  # whose address `tracking.uri` is, and `--uri` of mlflow-sync

Status = Literal["FINISHED", "FAILED", "KILLED"]

KEY_TAG = "align.run_key"  # by which a run is found whose id is unknown here
GOES_ON_TAG = "align.goes_on_from"  # the run that was given up for this one
NUMBERS_TAG = "align.numbers_of"  # a digest of the settings that the numbers of a run depend on
GROUP_TAG = "align.sweep"  # the sweep's folder: it names the group where the parent is not known
ROUNDS_TAG = "align.rounds"  # likewise the folder of rounds
TRIAL_TAG = "align.trial"  # the name of a training in its sweep
ROUND_TAG = "align.round"  # the number of a round
SIGNS_TAG = "align.stands_out"  # what stands out in a training, or nothing


@dataclass(frozen=True)
class DatasetNote:
    """Data that went into a run."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class ModelLink:
    """The model that a run made, and its path."""

    folder: str
    tags: dict[str, str]
    model_id: str  # the store's name for it, empty until the store knows it


@dataclass(frozen=True)
class RunRecord:
    """All that a store has to be sent of a run but its metrics, and what it knows already."""

    format_version: int
    uri: str  # without user and password
    experiment: str
    run_name: str
    key: str  # by which the run is found again when the answer that named it was lost
    run_id: str  # empty until there is one
    began_ms: int
    ended_ms: int
    status: str  # empty while it runs
    tags: dict[str, str]
    params: dict[str, str]
    datasets: tuple[DatasetNote, ...]
    artifacts: dict[str, bool]  # path, and whether the store has it
    models: tuple[ModelLink, ...]
    metrics_sent: int  # bytes of metrics.jsonl that the store is known to have


class Tracker(Protocol):
    """One run in one store; a call that is repeated, by this process or a later one, adds nothing.

    `begin` comes first. Each call raises when it fails, and is made again later.
    """

    def begin(self, record: RunRecord) -> str:
        """Finds the run by its id, else by its key, or makes it; sets it going if it has no status.

        Returns its id; empty if the record names one that the store lost. Then all starts over.
        """
        ...

    def label(self, record: RunRecord) -> None:
        """Parameters, tags and data, all that there are; a tag may have changed since."""
        ...

    def log(self, entries: Sequence[Entry]) -> int:
        """Lines of the journal in their order; returns how many numbers the store lacked.

        The first of them may be there already: each is known by `end`, its offset in the journal.
        """
        ...

    def artifact(self, path: Path, *, under: str) -> None:
        """A file or folder, in this folder of the run, in place of an earlier one of its name."""
        ...

    def model(self, link: ModelLink) -> str:
        """A model that stays where it is; returns the store's name for it."""
        ...

    def end(self, status: str, ended_ms: int) -> None:
        """Sets the status of an ended run; its files and models may still follow."""
        ...


def plain_address(address: str) -> str:
    """The address without secrets, and the same from every folder."""
    return bare_address(address) if "://" in address else str(Path(address).absolute())


@dataclass(frozen=True)
class TrackerKind:
    """Facts of a tracker that need no import of its library."""

    name: str  # of its ledger, and in TRACKERS
    title: str  # in messages
    named_by: str  # the settings that `address` reads, in words
    # By settings, environment and the folder that the run belongs to; empty: there is none.
    address: Callable[[TrackingOptions, Path], str]
    open: Callable[[str], Tracker]  # of an address
    # Called once all of an ended run was sent, for a library that writes the rest only then.
    close: Callable[[Any], None] = lambda _: None
    library: str = ""  # the package that it imports; installed by the extra of the tracker's name
    experiment: Callable[[TrackingOptions], str] = lambda options: redacted(options.experiment)
    plain: Callable[[str], str] = plain_address
    load: Callable[[str], object] = lambda _: None  # imports what an address needs, asks nobody
    # Keeps the library quiet; entered by the thread that works, before it is imported.
    quiet: Callable[[], AbstractContextManager[object]] = nullcontext
    failures: Callable[[], tuple[type[BaseException], ...]] = tuple  # beside those of every store
    parent_tag: str = "align.parent"  # the run, by its id, that a run belongs to
    note_tag: str = "align.description"  # Markdown that the store shows beside the run

    def is_failure(self, error: BaseException) -> bool:
        """Whether a store failed, which costs a warning; all else is an error of ours."""
        # OSError covers requests too, ValueError a malformed address or answer.
        known = (OSError, ValueError, ImportError, StorageError)
        return isinstance(error, (*known, *self.failures()))


def kind_of(name: str) -> TrackerKind:
    """The tracker of that name."""
    return cast("TrackerKind", import_module(f".{TRACKERS[name]}", __package__).KIND)


def wanted(options: TrackingOptions) -> list[str]:
    """The names of the trackers in use, MLflow where none is named."""
    named = [name.strip() for one in options.trackers for name in one.split(",")]
    return [*dict.fromkeys(named or ([MAIN] if options.mlflow else []))]


def require_trackers(options: TrackingOptions) -> None:
    """Refuses a tracker that there is not, or whose library is not installed."""
    for name in wanted(options):
        if name not in TRACKERS:
            raise UsageError(
                f"tracking.trackers: {name!r:.60} is none of {', '.join(TRACKERS)}. Name one of "
                "them, or several with commas between."
            )
        library = kind_of(name).library
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
    found = {name: kind_of(name).address(options, home) for name in wanted(options)}
    for name, address in found.items():
        if not address:
            raise UsageError(
                f"tracking.trackers: {name} has no address ({kind_of(name).named_by}). Set it, or "
                "leave the tracker out."
            )
    return found
