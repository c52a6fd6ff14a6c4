"""TensorBoard as a tracker: event files in the folder of the run, for any reader of them."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...schemas.config import TrackingOptions
from ...schemas.errors import StorageError
from ..storage.disk import fs
from .journal import Entry
from .tracker import GOES_ON_TAG, ModelLink, RunRecord, TrackerKind

FOLDER = "tensorboard"  # in the folder of the run
# A reader takes the files in the order of their names, and stays at the last of them.
EVENTS = "events.out.tfevents."
SETTINGS, MODEL, STATUS, NUMBERS = (f"{EVENTS}{name}" for name in ("1", "2-", "3", "4"))
LARGEST = 3.4028234663852886e38  # in 32 bits
SENT, DRAFT = "sent.json", "draft"
NOTE_TAG = "align.description"


@dataclass(frozen=True)
class Sent:
    """How far the file of numbers goes; what is behind was cut short by a kill."""

    journal: int = 0  # in bytes, as is the next
    bytes: int = 0


class TensorboardTracker:
    """One run as a folder of event files, of which only that of the numbers grows.

    A line of the journal always makes the same bytes: a reader may have read what is written anew.
    """

    def __init__(self, address: str) -> None:
        self._root = Path(address)
        self._run = self._root
        self._began = 0.0
        protos = "tensorboard.compat.proto"
        self._event = importlib.import_module(f"{protos}.event_pb2").Event
        self._summary = importlib.import_module(f"{protos}.summary_pb2")
        self._tensor = importlib.import_module(f"{protos}.tensor_pb2").TensorProto
        self._types = importlib.import_module(f"{protos}.types_pb2")
        self._hparams = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
        self._hparams_status = importlib.import_module("tensorboard.plugins.hparams.api_pb2")
        self._record_writer = _record_writer()

    def begin(self, record: RunRecord) -> str:
        """The folder's name; empty if it, or a number that it had, is no longer there."""
        self._run = self._root / name_of(record)
        self._require_no_links()
        if record.run_id and not (record.run_id == self._run.name and self._is_whole()):
            return ""
        for folder in (self._root, self._run):
            fs.make_folder(folder)
        for drafted in (SENT, DRAFT):
            fs.drop_drafts(self._run / drafted)
        if not self._is_whole():
            self._keep_sent(Sent())
        self._remove_given_up(record)
        self._began = record.began_ms / 1000
        if not record.status:
            self._keep(STATUS, self._ending("RUNNING", 0))
        return self._run.name

    def label(self, record: RunRecord) -> None:
        """Parameters as hyperparameters, and as texts with all else."""
        data = {
            note.digest: f"{note.name}, {note.context}, {note.source}" for note in record.datasets
        }
        note = record.tags.get(NOTE_TAG, "")
        tags = {name: value for name, value in record.tags.items() if name != NOTE_TAG}
        tables = {"settings": record.params, "tags": tags, "data": data}
        texts = [self._text(name, table(rows)) for name, rows in tables.items() if rows]
        texts += [self._text("description", note)] if note else []
        info = self._hparams.SessionStartInfo(start_time_secs=self._began)
        for name, value in record.params.items():
            info.hparams[name].MergeFrom(_plain_value(value))
        start = self._hparams_value("session_start_info", session_start_info=info)
        self._keep(SETTINGS, [*texts, start])

    def log(self, entries: Sequence[Entry]) -> int:
        """An event for each line that the file lacks, with all numbers of the line."""
        sent = self._sent()
        new = [entry for entry in entries if entry.end > sent.journal]
        if not new:
            return 0
        path = self._run / NUMBERS
        with path.open("r+b" if sent.bytes else "wb") as file:
            if os.fstat(file.fileno()).st_size < sent.bytes:
                raise StorageError(f"{path} was cut short")
            file.truncate(sent.bytes)
            file.seek(sent.bytes)
            writer = self._record_writer(file)
            if not sent.bytes:
                writer.write(self._version())
            for entry in new:
                if entry.points:
                    writer.write(self._numbers(entry))
            file.flush()
            os.fsync(file.fileno())  # before it is said that they are there
            size = file.tell()
        self._keep_sent(Sent(new[-1].end, size))
        return sum(len(entry.points) for entry in new)

    def artifact(self, path: Path, *, under: str) -> None:
        """Nothing: the file is in the folder of the run, and TensorBoard shows none."""

    def model(self, link: ModelLink) -> str:
        """The path of the model, as a text."""
        model_id = hashlib.sha256(link.folder.encode()).hexdigest()[:16]
        text = table({"folder": link.folder, **link.tags})
        self._keep(f"{MODEL}{model_id}", [self._text(f"model/{model_id}", text)])
        return model_id

    def end(self, status: str, ended_ms: int) -> None:
        """The status, as a text and as that of the hyperparameters."""
        self._keep(STATUS, self._ending(status, ended_ms))

    def _require_no_links(self) -> None:
        found = [self._root, self._run, *(self._run.iterdir() if self._run.is_dir() else ())]
        for path in found:
            if path.is_symlink():
                raise StorageError(f"{path} is a link, and leads elsewhere. Remove it.")

    def _is_whole(self) -> bool:
        """Whether all that is said to be there is: a power loss or a person may have cut it."""
        numbers = self._run / NUMBERS
        try:
            needed = self._sent().bytes if (self._run / SENT).exists() else -1
        except (ValueError, TypeError):
            return False
        return needed == 0 or (needed > 0 and numbers.exists() and numbers.stat().st_size >= needed)

    def _remove_given_up(self, record: RunRecord) -> None:
        """Removes what the same run had of steps that were trained again after a kill."""
        before, name = record.tags.get(GOES_ON_TAG, ""), self._run.name
        is_same = before.rpartition("-")[0] == name.rpartition("-")[0]
        if is_same and before not in ("", name) and before == Path(before).name:
            fs.remove_tree(self._root / before)

    def _sent(self) -> Sent:
        sent = Sent(**json.loads(fs.read_bytes(self._run / SENT)))
        if not (type(sent.journal) is type(sent.bytes) is int):
            raise ValueError(f"{SENT} holds no numbers")
        return sent

    def _keep_sent(self, sent: Sent) -> None:
        fs.publish(self._run / SENT, json.dumps(asdict(sent)).encode())

    def _keep(self, name: str, values: Iterable[Any]) -> None:
        """A small file that is written whole; its draft must not look like a file of events."""
        summary = self._summary.Summary(value=values)
        content = io.BytesIO()
        writer = self._record_writer(content)
        writer.write(self._version())
        writer.write(self._event(wall_time=self._began, summary=summary).SerializeToString())
        fs.publish(self._run / DRAFT, content.getvalue())
        fs.rename(self._run / DRAFT, self._run / name)

    def _version(self) -> bytes:
        """The event that every file begins with."""
        event = self._event(wall_time=self._began, file_version="brain.Event:2")
        return bytes(event.SerializeToString())

    def _numbers(self, entry: Entry) -> bytes:
        """One event of a line; in 32 bits, for TensorBoard's data server shows no other numbers."""
        make = self._summary.Summary.Value
        values = [
            make(tag=point.key, simple_value=_in_32_bits(point.value)) for point in entry.points
        ]
        summary = self._summary.Summary(value=values)
        when = entry.points[0].time_ms / 1000
        event = self._event(wall_time=when, step=entry.step, summary=summary)
        return bytes(event.SerializeToString())

    def _text(self, name: str, text: str) -> Any:
        tensor = self._tensor(dtype=self._types.DT_STRING, string_val=[text.encode()])
        return self._value(name, "text", tensor)

    def _value(self, name: str, plugin: str, tensor: Any) -> Any:
        """A value of a kind that one of TensorBoard's own plugins shows."""
        tensor.tensor_shape.SetInParent()  # of no dimensions
        metadata = self._summary.SummaryMetadata(
            plugin_data={"plugin_name": plugin},
            data_class=self._summary.DATA_CLASS_TENSOR,
        )
        return self._summary.Summary.Value(tag=name, metadata=metadata, tensor=tensor)

    def _ending(self, status: str, ended_ms: int) -> list[Any]:
        names = {"FINISHED": "SUCCESS", "FAILED": "FAILURE", "RUNNING": "RUNNING"}
        known = self._hparams_status.Status.Value(f"STATUS_{names.get(status, 'UNKNOWN')}")
        info = self._hparams.SessionEndInfo(status=known, end_time_secs=ended_ms / 1000)
        value = self._hparams_value("session_end_info", session_end_info=info)
        return [self._text("status", status), value]

    def _hparams_value(self, name: str, **info: Any) -> Any:
        content = self._hparams.HParamsPluginData(version=0, **info).SerializeToString()
        value = self._value(
            f"_hparams_/{name}", "hparams", self._tensor(dtype=self._types.DT_FLOAT)
        )
        value.metadata.plugin_data.content = content
        value.tensor.float_val.append(0.0)  # one without a value is left out
        return value


def name_of(record: RunRecord) -> str:
    """The run, when it began, and its key, which is another one after a future was given up."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", record.run_name).strip("-.")[:100]
    began = datetime.fromtimestamp(record.began_ms // 1000, UTC)
    return f"{name}-{began:%Y%m%d-%H%M%S}{record.began_ms % 1000:03d}-{record.key}"


def table(rows: Mapping[str, str]) -> str:
    """Two columns of Markdown, with signs that would be markup written as HTML has them."""
    escaped = {"\n": "&#10;", "\r": "&#13;", **{sign: f"&#{ord(sign)};" for sign in "|\\`*_<>[]"}}
    change = str.maketrans({"&": "&amp;", **escaped})
    lines = [f"| {name} | {value.translate(change)} |" for name, value in rows.items()]
    return "\n".join(["| name | value |", "|---|---|", *lines])


def _in_32_bits(value: float) -> float:
    """The nearest number, or the largest: TensorBoard draws no infinity."""
    return max(-LARGEST, min(LARGEST, value))


def _plain_value(text: str) -> Any:
    """A setting as a number or a truth where it is one: TensorBoard filters by it."""
    value = importlib.import_module("google.protobuf.struct_pb2").Value
    if text in ("True", "False"):
        return value(bool_value=text == "True")
    try:
        number = float(text)
    except ValueError:
        return value(string_value=text)
    return value(number_value=number) if math.isfinite(number) else value(string_value=text)


def _record_writer(_: str = "") -> Any:
    return importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter


def _address(options: TrackingOptions, home: Path) -> str:
    return str(home.absolute() / FOLDER)


KIND = TrackerKind(
    name="tensorboard",
    title="TensorBoard",
    named_by="the folder tensorboard of the run",
    library="tensorboard",
    address=_address,
    open=TensorboardTracker,
    load=_record_writer,
    note_tag=NOTE_TAG,
    plain=lambda address: FOLDER,  # it goes where the run's folder goes
)
