"""The note that names a run until MLflow knows its end: a process that was killed ends nothing."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from typing import TYPE_CHECKING

from ...schemas.errors import CorruptionError
from ...schemas.json_codec import CodecError, from_json, to_json
from ...schemas.tracking import UnendedRun
from ..storage import fs
from .guard import address_of
from .ledger import KEY, plain_uri

if TYPE_CHECKING:
    from pathlib import Path

    from .mlflow_store import MlflowStore

logger = logging.getLogger("align")


class Note:
    """One file; only the owner of the folder that holds it reads or changes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, uri: str, experiment: str) -> str:
        """Names a run before there is one; returns the key by which it is to be found."""
        run = UnendedRun(plain_uri(uri), experiment, secrets.token_hex(8), "", 0)
        self._store(run)
        return run.key

    def end(self, status: str) -> None:
        """How the run ended, for whoever tells the store."""
        if run := self.read():
            self._store(dataclasses.replace(run, status=status, ended_ms=_now()))

    def remove(self) -> None:
        """The store knows the end."""
        fs.unlink(self._path)

    def read(self) -> UnendedRun | None:
        """The run that is named, if one is."""
        if not self._path.exists():
            return None
        try:
            run = from_json(UnendedRun, fs.read_bytes(self._path))
            if not KEY.fullmatch(run.key):  # it stands in a question to the store
                raise CodecError(f"key {run.key!r:.40} is not sixteen hexadecimal digits")
        except CodecError as error:
            raise CorruptionError(
                f"{self._path} is damaged: {error}. Remove it: MLflow is then not told how that "
                "run ended."
            ) from error
        return run

    def settle(self, store: MlflowStore, uri: str) -> str:
        """Tells a store how the run ended that is named; returns its id, empty for none.

        Nobody is at work at it: where nobody said how it ended, it was killed.
        """
        try:
            run = self.read()
        except CorruptionError as error:
            logger.warning("%s", error)
            return ""
        if run is None:
            return ""
        if run.uri != plain_uri(uri):
            logger.warning(
                "%s names a run in another store, %s, which is not told how it ended.",
                self._path,
                address_of(run.uri),
            )
            return ""
        if run_id := store.run_of_key(run.experiment, run.key):
            store.end_if_running(run_id, run.status or "KILLED", ended_ms=run.ended_ms or _now())
        self.remove()
        return run_id

    def _store(self, run: UnendedRun) -> None:
        fs.publish(self._path, to_json(run).encode(), label="mlflow")


def _now() -> int:
    return time.time_ns() // 1_000_000
