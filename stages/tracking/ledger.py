"""`_align/mlflow.json`: what MLflow is to be told of a run, kept until it has been told."""

from __future__ import annotations

import dataclasses
import re
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.errors import CorruptionError, UsageError
from ...schemas.json_codec import CodecError, from_signed_json, to_signed_json
from ...schemas.safe_text import bare_address
from ...schemas.tracking import MlflowRecord
from ..storage import fs
from .fast_sqlite import sqlite_file
from .mlflow_store import GOES_ON_TAG

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT_VERSION = 1
KEY = re.compile(r"[0-9a-f]{16}")


class Ledger:
    """The record in memory and on disk, for the thread that works and the one that sends."""

    def __init__(self, path: Path, record: MlflowRecord) -> None:
        self._path = path
        self._lock = threading.RLock()
        self.record = record

    def change(self, **values: Any) -> None:
        """Replaces fields, durably."""
        with self._lock:
            changed = dataclasses.replace(self.record, **values)
            if changed != self.record:
                self.record = changed
                self.store()

    def add(self, field: str, values: Mapping[str, Any]) -> None:
        """Merges into a field that is a mapping, durably."""
        with self._lock:
            self.change(**{field: {**getattr(self.record, field), **values}})

    def append(self, field: str, value: Any) -> None:
        """Adds to a field that is a sequence, unless the value is in it, durably."""
        with self._lock:
            values = getattr(self.record, field)
            if value not in values:
                self.change(**{field: (*values, value)})

    def forget_run(self) -> None:
        """The store has no such run: all has to be told anew."""
        with self._lock:
            models = (dataclasses.replace(link, model_id="") for link in self.record.models)
            self.change(
                run_id="",
                artifacts=dict.fromkeys(self.record.artifacts, False),
                models=tuple(models),
                metrics_sent=0,
            )

    def begin_again(self) -> None:
        """The store may have numbers of a future that was given up: the rest is another run's."""
        with self._lock:
            before = self.record.run_id
            origin = {GOES_ON_TAG: before} if before else {}
            self.forget_run()
            self.change(key=secrets.token_hex(8), tags={**self.record.tags, **origin})

    def move_to(self, uri: str) -> None:
        """From now on another store is to be told."""
        with self._lock:
            if plain_uri(uri) != self.record.uri:
                self.forget_run()
                self.change(uri=plain_uri(uri))

    def store(self) -> None:
        """Writes the record as it is."""
        fs.publish(self._path, to_signed_json(self.record).encode(), label="mlflow")


def open_ledger(path: Path, *, uri: str, experiment: str, run_name: str) -> Ledger:
    """Goes on with the record of an earlier process, or begins one; no uri is the one it had."""
    if path.exists():
        ledger = load_ledger(path)
        if uri:
            ledger.move_to(uri)
        ledger.change(status="", ended_ms=0)
        return ledger
    record = MlflowRecord(
        format_version=FORMAT_VERSION,
        uri=plain_uri(uri),
        experiment=experiment,
        run_name=run_name,
        key=secrets.token_hex(8),
        run_id="",
        began_ms=time.time_ns() // 1_000_000,
        ended_ms=0,
        status="",
        tags={},
        params={},
        datasets=(),
        artifacts={},
        models=(),
        metrics_sent=0,
    )
    ledger = Ledger(path, record)
    ledger.store()
    return ledger


def load_ledger(path: Path) -> Ledger:
    """What MLflow was to be told about a run."""
    if not path.exists():
        raise UsageError(
            f"{path.parent.parent} holds no run that was recorded in MLflow: it has no "
            f"{path.parent.name}/{path.name}. Name the --output of `align train`."
        )
    try:
        record = from_signed_json(MlflowRecord, fs.read_bytes(path))
        if not KEY.fullmatch(record.key):  # it stands in a question to the store
            raise CodecError(f"key {record.key!r:.40} is not sixteen hexadecimal digits")
        return Ledger(path, record)
    except CodecError as error:
        raise CorruptionError(
            f"{path} is damaged: {error}. Remove it: the run is then recorded as a new one."
        ) from error


def plain_uri(uri: str) -> str:
    """The address without secrets, and the same from every folder."""
    if path := sqlite_file(uri):
        return f"sqlite:///{path.absolute()}"
    return bare_address(uri) if "://" in uri else str(Path(uri).absolute())
