"""Finds the tensors of a model folder by reading safetensors headers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...schemas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

READ_BYTES = 8 << 20
LONGEST_HEADER = 100_000_000  # what the format allows


@dataclass(frozen=True)
class StoredTensor:
    """One tensor and where its bytes lie."""

    name: str
    dtype: str  # as the format spells it: F32, BF16, ...
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def model_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a model folder, sorted by name."""
    return _tensors_of(_weight_files(folder))


def adapter_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a PEFT adapter folder, sorted by name."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise UsageError(
            f"{folder}: there is no adapter_model.safetensors. Set model.adapter to a folder that "
            "PEFT saved with safetensors; convert an adapter_model.bin by loading and saving it."
        )
    return _tensors_of([file])


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{file}: the file is missing. Point to a complete folder as save_pretrained writes it."
        ) from None
    except ValueError as error:
        raise UsageError(f"{file}: not valid JSON ({error}). Copy the file again.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file}: must hold one JSON object. Copy the file again.")
    return value


def tensor_sha256(tensor: StoredTensor) -> str:
    """Digest of a tensor's raw bytes."""
    digest, left = hashlib.sha256(), tensor.num_bytes
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left > 0:
            block = stream.read(min(READ_BYTES, left))
            if not block:
                raise _cut_short(tensor.file)
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The files a loader would read, in its order of preference."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UsageError(_no_weights(folder))
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise UsageError(
            f"{index}: {len(missing)} of the {len(names)} files it names are missing. "
            f"First: {missing[:10]}. Copy the model folder again."
        )
    return [folder / name for name in names]


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return (
            f"{folder}: the weights are pickles (.bin or .pt), which can run code when read. "
            "Convert them once: load the model you trust and save_pretrained it again."
        )
    return (
        f"{folder}: there is no model.safetensors and no model.safetensors.index.json. "
        "Set model.path to a folder that holds the weights."
    )


def _tensors_of(files: list[Path]) -> list[StoredTensor]:
    tensors = [tensor for file in files for tensor in _read_header(file)]
    return sorted(tensors, key=lambda tensor: tensor.name)


def _read_header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise _cut_short(file)
        try:
            entries = json.loads(stream.read(length))
        except ValueError:
            raise UsageError(f"{file}: not a safetensors file. Copy the file again.") from None
    entries.pop("__metadata__", None)
    tensors = [_stored(name, entry, file, 8 + length) for name, entry in entries.items()]
    if any(tensor.start + tensor.num_bytes > size for tensor in tensors):
        raise _cut_short(file)
    return tensors


def _stored(name: str, entry: dict[str, Any], file: Path, base: int) -> StoredTensor:
    first, last = entry["data_offsets"]
    return StoredTensor(
        name, entry["dtype"], tuple(entry["shape"]), file, base + first, last - first
    )


def _cut_short(file: Path) -> UsageError:
    return UsageError(f"{file}: the file is cut short. Copy it again.")
