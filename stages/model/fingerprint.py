"""Who a model is: digests of its weights, config, adapter and code; no torch, no transformers."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas.errors import FingerprintError, UsageError
from .tensor_files import StoredTensor, adapter_tensors, model_tensors, read_json, tensor_sha256

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNUSED_WEIGHTS = "model.unused_weights"  # how many, where there are any and they are allowed
# Written anew by each version or machine, without effect on what the model computes.
VOLATILE_CONFIG = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"}
)
VOLATILE_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping"}
)
# A head equal to the input embedding is the same model whether it is stored or left out.
HEAD_NAMES = frozenset({"lm_head.weight", "embed_out.weight"})


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model as they were when they were digested."""

    versions: dict[Path, tuple[int, int, int]]  # inode, length, time of change

    @staticmethod
    def of(folder: str, adapter: str, *, with_code: bool) -> ModelFiles:
        """What is read of a model, its adapter and its code."""
        weights = {tensor.file for tensor in model_tensors(Path(folder))}
        files = {Path(folder) / "config.json", *weights}
        if adapter:
            files |= {tensor.file for tensor in adapter_tensors(Path(adapter))}
            files.add(Path(adapter) / "adapter_config.json")
        if with_code:
            files |= {*Path(folder).glob("**/*.py")}
        return ModelFiles({file: _version(file) for file in sorted(files)})

    def require_unchanged(self) -> None:
        """Refuses what was computed from other files; loaded weights may still lie in theirs."""
        for file, version in self.versions.items():
            if _version(file) != version:
                raise FingerprintError(
                    f"{file} changed after it was digested, so what is computed may not be of the "
                    "model this run began with. Leave the folder as it is while a run reads it, "
                    "then run the same command again."
                )


def _version(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns


def weights_digest(folder: str) -> str:
    """Names the tensors of a model, whatever files they are spread over."""
    return _tensors_digest(model_tensors(Path(folder)))


def config_digest(folder: str) -> str:
    """Names the architecture and its settings."""
    return _json_digest(model_config(folder), VOLATILE_CONFIG)


def adapter_digest(folder: str) -> str:
    """Names a PEFT adapter: its settings and its tensors."""
    root = Path(folder)
    tensors = adapter_tensors(root)
    settings = _json_digest(read_json(root / "adapter_config.json"), VOLATILE_ADAPTER)
    return _sha256(settings, _tensors_digest(tensors))


def code_digest(folder: str) -> str:
    """Names the Python files of a model folder that brings its own code."""
    files = sorted(Path(folder).glob("**/*.py"))
    return _sha256(*(f"{file.relative_to(folder)} {_file_sha256(file)}" for file in files))


def stored_dtype(folder: str) -> str:
    """The floating dtype that holds most of the weights, for example `bfloat16`."""
    sizes: dict[str, int] = {}
    for tensor in model_tensors(Path(folder)):
        if tensor.dtype in DTYPE_NAMES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    if not sizes:
        raise UsageError(
            f"{folder}: the weights hold no float64, float32, float16 or bfloat16 tensor. "
            "Set model.dtype to the dtype to compute in."
        )
    return DTYPE_NAMES[max(sorted(sizes), key=sizes.__getitem__)]


def model_config(folder: str) -> dict[str, Any]:
    """The config.json of a model folder."""
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(
            f"{folder}: there is no such model folder. Set model.path to a folder that holds "
            "config.json and safetensors weights."
        )
    return read_json(root / "config.json")


def _tensors_digest(tensors: list[StoredTensor]) -> str:
    with ThreadPoolExecutor() as pool:  # hashing and reading both release the interpreter
        contents = list(pool.map(tensor_sha256, tensors))
    lines = [
        f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {content}"
        for tensor, content in zip(tensors, contents, strict=True)
        if not (tensor.name in HEAD_NAMES and contents.count(content) > 1)
    ]
    return _sha256(*sorted(lines))


def _json_digest(settings: dict[str, Any], volatile: frozenset[str]) -> str:
    return _sha256(json.dumps(_without(settings, volatile), sort_keys=True))


def _without(value: Any, volatile: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, volatile) for key, item in value.items() if key not in volatile}
    return value


def _file_sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _sha256(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
