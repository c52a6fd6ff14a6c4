"""Sends trackers what they missed of a run; sending it twice changes nothing.

The folder may come from someone else, so what it names is not trusted: the address is the user's
own or one given by hand, and only files inside the folder are sent.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...schemas.config import TrackingOptions
from ...schemas.errors import AlignError, StorageError, UsageError, log_failure
from ...schemas.safe_text import redacted
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.output_folder import SCORES
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ...stages.tracking.delivery import Delivery
from ...stages.tracking.outbox import (
    Ledger,
    address_of,
    close_record,
    kinds_in,
    load_ledger,
    now_ms,
    reason_of,
    remove_if_sent,
    unsent_runs,
)
from ...stages.tracking.tracker import (
    GROUP_TAG,
    MAIN,
    ROUNDS_TAG,
    TRACKERS,
    TrackerKind,
    kind_of,
    wanted,
)
from ..options.settings import FILE_NAME, load_settings

logger = logging.getLogger("align")

STATUS = {"finished": "FINISHED", "failed": "FAILED", "time": "KILLED", "signal": "KILLED"}


@dataclass(frozen=True)
class Synced:
    """The run in the store, and how much of it was missing."""

    tracker: str
    uri: str
    run_id: str
    status: str
    points_sent: int


def own_options(root: Path, config: Path | None) -> TrackingOptions:
    """The user's tracking options from `config` or the align.yaml here, never from the run."""
    here = Path.cwd()
    if config is None and (here / FILE_NAME).exists() and here.is_relative_to(root.resolve()):
        raise UsageError(
            f"{here / FILE_NAME} is in the run itself, which does not decide where your data "
            "go. Run the command elsewhere, or name a file by --config."
        )
    return load_settings({}, [], file=config).config.tracking


def sync_runs(root: Path, options: TrackingOptions, *, uri: str = "") -> list[Synced]:
    """Sends the rest of a training run, or of every run of a cache, scores, sweep or rounds.

    One that fails does not keep the others from being sent; the first failure is raised at the end.
    """
    sync = _Sync(options, uri)
    if kinds_in(RunFolder(root)):
        sync.send(RunFolder(root), root)
    else:
        for home in (root, root / SCORES):
            for folder in unsent_runs(home):
                sync.send(folder, home)
        parents = {one.tracker: one.run_id for one in sync.done}
        for home in _homes_within(root):
            for folder in (*unsent_runs(home), RunFolder(home)):
                sync.send(folder, home, parents=parents)
    if sync.failed:
        raise sync.failed[0]
    if not sync.done:
        raise _nothing_to_send(root)
    return sync.done


_GROUPS = {GROUP_TAG, ROUNDS_TAG}


def _homes_within(root: Path) -> list[Path]:
    """The folders of the runs of a sweep, and those of the verbs of rounds."""
    found = [*root.glob("*"), *root.glob("round-*/*"), *root.glob("held-out/*")]
    return [path for path in sorted(found) if not (path.is_symlink() or path.parent.is_symlink())]


def _nothing_to_send(root: Path) -> UsageError:
    titles = " or ".join(kind_of(name).title for name in TRACKERS)
    ledger = RunFolder(root).ledger(MAIN).relative_to(root)
    return UsageError(
        f"{root} holds no run that was recorded in {titles} and not sent whole: it has no "
        f"{ledger}, and no run in {ledger.parent}/outbox. Name the --output of `align train`, of "
        "a sweep, or a cache."
    )


@dataclass(frozen=True)
class _Sync:
    """The runs that were sent, and what failed."""

    options: TrackingOptions
    uri: str
    done: list[Synced] = field(default_factory=list)
    failed: list[AlignError] = field(default_factory=list)

    def send(
        self, folder: RunFolder, home: Path, *, parents: Mapping[str, str] | None = None
    ) -> None:
        """Sends a run to each of its trackers; as one of a group only if its tags say so."""
        for kind in kinds_in(folder):
            with self._kept():
                if parents is None or _GROUPS & load_ledger(kind, folder).record.tags.keys():
                    parent = (parents or {}).get(kind.name, "")
                    uri = self.uri if kind.name == MAIN else ""
                    self.done.append(
                        sync_ledger(kind, folder, home, self.options, uri=uri, parent=parent)
                    )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except AlignError as error:
            self.failed.append(error)


def require_no_links(folder: RunFolder) -> None:
    """Refuses a run whose records are somebody else's."""
    for private in {folder.private, *(folder.ledger(name).parent for name in TRACKERS)}:
        if private.is_symlink():
            raise UsageError(f"{private} is a link. Name the folder of the run itself.")


def sync_ledger(
    kind: TrackerKind,
    folder: RunFolder,
    home: Path,
    options: TrackingOptions,
    *,
    uri: str = "",
    parent: str = "",
) -> Synced:
    """Sends a run that is in its own folder, or in the outbox of `home`, to one tracker."""
    require_no_links(folder)
    load_ledger(kind, folder)
    with owner_lock(folder.root, "mlflow-sync"):
        ledger = load_ledger(kind, folder)
        address = _address(kind, home, ledger.record.uri, options, uri)
        ledger.move_to(address)
        if parent and kind.parent_tag not in ledger.record.tags:
            ledger.add("tags", {kind.parent_tag: parent})
        ending = read_ending(folder)
        if not ledger.record.status:  # no process owns it, and the store does not know its end
            status = STATUS[ending.ending] if ending else "KILLED"
            ledger.change(status=status, ended_ms=now_ms())
        points = _deliver(address, folder, ledger)
        if folder.root != home:
            close_record(ledger, folder)
        record = ledger.record
    if folder.root != home:
        remove_if_sent(folder)
    return Synced(kind.name, record.uri, record.run_id, record.status, points)


def owe_again(folder: RunFolder, files: Sequence[Path]) -> None:
    """Notes files that a recorded run is given after its end; who calls it owns the folder."""
    for kind in kinds_in(folder):
        ledger = load_ledger(kind, folder)
        for file in files:
            ledger.renew_artifact(file.relative_to(folder.root).as_posix())


def send_again(folder: RunFolder, options: TrackingOptions) -> None:
    """Sends what is owed of a run that has ended; what a store did not get, `mlflow-sync` sends."""
    for kind in kinds_in(folder):
        if kind.name in wanted(options):
            ledger = load_ledger(kind, folder)
            with log_failure(f"{kind.title} lacks a part of {folder.root}"):
                address = _address(kind, folder.root, ledger.record.uri, options, uri="")
                _deliver(address, folder, ledger)


def _deliver(address: str, folder: RunFolder, ledger: Ledger) -> int:
    kind = ledger.kind
    with asked_store(kind, address):
        delivery = Delivery(kind.open(address), ledger, folder.metrics)
        delivery.deliver()
        return delivery.points


@contextmanager
def asked_store(kind: TrackerKind, address: str) -> Iterator[None]:
    """Keeps the library quiet inside; whatever it raises is a StorageError that says what to do."""
    try:
        with kind.quiet():
            yield
    except Exception as error:  # whatever the libraries of a store raise
        if not kind.is_failure(error):
            logger.error("%s", redacted(traceback.format_exc()))
        other = "name another store with --uri, then " if kind.name == MAIN else ""
        raise StorageError(
            f"{kind.title} at {address_of(address)} failed: {reason_of(error)}. Start it, or "
            f"{other}run the same command again."
        ) from error


def _address(kind: TrackerKind, root: Path, named: str, options: TrackingOptions, uri: str) -> str:
    """The store to send to: the one given by hand, else the user's, if the folder names it too."""
    own = kind.address(options, root)
    if uri or (own and kind.plain(own) == named):
        return uri or own
    way = (
        f"pass --uri {named or 'ADDRESS'}, with its password if it has one, to send the run there"
        if kind.name == MAIN
        else "name that store there, to send the run to it"
    )
    raise UsageError(
        f"{root} names the store {named or 'nowhere'}, and your own ({kind.named_by}) is "
        f"{kind.plain(own) if own else 'nowhere'}. A folder does not decide where your data go: "
        f"{way}."
    )
