"""A model's folder: its stored tensors and config, and the digests that identify it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...schemas.config import ModelOptions
from ...schemas.errors import FingerprintError, UsageError
from ...schemas.file_version import FileVersion, Remember, digest_anew
from ...schemas.safe_text import is_plain_name

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNUSED_WEIGHTS = "model.unused_weights"  # their number, if some exist and are allowed
# Keys that differ between versions or machines, without effect on the model's numbers.
VOLATILE_CONFIG = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"}
)
VOLATILE_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping"}
)
# The values of an adapter's init_lora_weights with which peft leaves the base as it is.
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
# A head that equals the input embedding may be stored or left out: the model is the same.
HEAD_NAMES = frozenset({"lm_head.weight", "embed_out.weight"})
CONFIG = "config.json"
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The files for chat and generation, beside weights and config.json.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "tekken.json",
    "LICENSE*",
)
READ_BYTES = 8 << 20
_AGAIN = "Do not change the folder while a run reads it, then run the same command again."


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, with their versions when they were digested."""

    versions: dict[Path, FileVersion]

    @staticmethod
    def of(options: ModelOptions) -> ModelFiles:
        """The files of a model and its adapter that are read."""
        folder, adapter = Path(options.path), Path(options.adapter)
        files = {folder / "config.json", *(tensor.file for tensor in model_tensors(folder))}
        if options.adapter:
            files |= {tensor.file for tensor in adapter_tensors(adapter)}
            files.add(adapter / "adapter_config.json")
        return ModelFiles({file: FileVersion.of(file) for file in sorted(files)})

    def require_unchanged(self) -> None:
        """Refuses changed files: loaded weights may still be mapped from them."""
        for file, version in self.versions.items():
            if not FileVersion.of(file).is_content_of(version):
                raise FingerprintError(
                    f"{file} changed after it was digested, so results may be of another model "
                    f"than the one at the start. {_AGAIN}"
                )


def model_identity(options: ModelOptions, remember: Remember = digest_anew) -> dict[str, str]:
    """Digests of the files of a model and its adapter."""
    path, adapter = options.path, options.adapter
    return {
        "model.weights": weights_digest(path, remember),
        "model.config": config_digest(path),
        "model.adapter": adapter_digest(adapter, remember) if adapter else "none",
    }


def weights_digest(folder: str, remember: Remember = digest_anew) -> str:
    """Digest of the tensors of a model, independent of how they are split into files."""
    return _tensors_digest(model_tensors(Path(folder)), remember)


def config_digest(folder: str) -> str:
    """Digest of the architecture and its settings."""
    return _json_digest(model_config(folder), VOLATILE_CONFIG)


def adapter_digest(folder: str, remember: Remember = digest_anew) -> str:
    """Digest of a PEFT adapter: its settings and its tensors."""
    root = Path(folder)
    tensors = adapter_tensors(root)
    settings = _json_digest(read_json(root / "adapter_config.json"), VOLATILE_ADAPTER)
    return _sha256(settings, _tensors_digest(tensors, remember))


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
    require_folder(folder, "Name a folder with config.json and safetensors weights.")
    return read_json(Path(folder) / CONFIG)


def require_folder(folder: str, advice: str, *, having: Sequence[str] = ()) -> None:
    """Refuses a missing folder of a model, and one that has none of these files."""
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"{folder}: no such model folder. {advice}")
    if having and not any((root / name).is_file() for name in having):
        raise UsageError(f"{folder} is no model folder: it has no {having[0]}. {advice}")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{file}: the file is missing. Use a complete folder, as save_pretrained writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not valid JSON ({error}). Copy the file again.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: must hold one JSON object. Copy the file again.")
    return content


def require_own_weights(folder: str) -> dict[str, Any]:
    """The config.json of a folder; refuses entries that make transformers load other weights."""
    config, root = model_config(folder), Path(folder)
    if (root / "adapter_config.json").exists():
        raise UsageError(
            f"{root / 'adapter_config.json'}: transformers would add this adapter by itself. Move "
            "it to a folder of its own, and name that folder in model.adapter."
        )
    if other := config.get("transformers_weights"):
        raise UsageError(
            f"{root / CONFIG}: transformers_weights is {other!r}, so transformers would load that "
            f"file instead of {SINGLE_FILE}. Remove the entry."
        )
    return config


def require_peft() -> None:
    """Refuses adapters if peft is not installed."""
    if find_spec("peft") is None:
        raise UsageError("Adapters and --lora need the package peft. Install it: pip install peft")


def require_bitsandbytes(setting: str) -> None:
    """Refuses a setting that needs bitsandbytes if it is not installed."""
    if find_spec("bitsandbytes") is None:
        raise UsageError(
            f"{setting} needs the package bitsandbytes. Install it: pip install bitsandbytes"
        )


def require_adapter(folder: str) -> None:
    """Refuses an incomplete adapter folder: peft would look the adapter up on the Hub."""
    require_peft()
    read_json(Path(folder) / "adapter_config.json")
    adapter_tensors(Path(folder))


def adapter_settings(folder: str) -> dict[str, Any]:
    """The settings of a LoRA adapter, by align's names; refuses one that cannot learn further."""
    require_adapter(folder)
    file = Path(folder) / "adapter_config.json"
    own = read_json(file)
    for name, is_right in (
        ("peft_type", own.get("peft_type") == "LORA"),
        ("init_lora_weights", own.get("init_lora_weights", True) in KEEPS_BASE),
        ("kasa_config", not own.get("kasa_config")),
    ):
        if not is_right:
            raise UsageError(
                f"{file}: {name} is {own.get(name)}, so the adapter cannot be trained further. "
                "Merge it into a plain model, and make the cache with that model."
            )
    targets = own.get("target_modules") or []
    return {
        "rank": own.get("r", 8),
        "alpha": float(own.get("lora_alpha", 8)),
        "dropout": float(own.get("lora_dropout", 0)),
        "targets": sorted([targets] if isinstance(targets, str) else targets)
        + sorted(own.get("target_parameters") or []),
    }


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json, completed by those of a composite's text part."""
    inner = config.get("text_config")
    parts = (inner if isinstance(inner, dict) else {}, config)
    return {name: value for part in parts for name, value in part.items() if value is not None}


def _tensors_digest(tensors: list[StoredTensor], remember: Remember) -> str:
    contents: dict[StoredTensor, str] = {}
    for file in sorted({tensor.file for tensor in tensors}):
        stored = [tensor for tensor in tensors if tensor.file == file]
        digests = remember(file, partial(_contents, file))
        if len(digests) != len(stored):
            raise FingerprintError(f"{file} changed while it was digested. {_AGAIN}")
        contents |= zip(stored, digests, strict=True)
    count = Counter(contents.values())
    lines = [
        f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {content}"
        for tensor, content in contents.items()
        if not (tensor.name in HEAD_NAMES and count[content] > 1)
    ]
    return _sha256(*sorted(lines))


def _contents(file: Path) -> list[str]:
    """Digests of a file's tensors by name; the header is read again, for the same version."""
    with ThreadPoolExecutor() as pool:  # hashing and reading both release the GIL
        return list(pool.map(tensor_sha256, tensors_of([file])))


def _json_digest(settings: dict[str, Any], volatile: frozenset[str]) -> str:
    return _sha256(json.dumps(_without(settings, volatile), sort_keys=True))


def _without(value: Any, volatile: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, volatile) for key, item in value.items() if key not in volatile}
    return value


def _sha256(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its name, type and shape, and its byte offset in a file."""

    name: str
    dtype: str  # the format's name: F32, BF16, ...
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def model_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a model folder, sorted by name."""
    return tensors_of(_weight_files(folder))


def adapter_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a PEFT adapter folder, sorted by name."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise UsageError(
            f"{folder}: there is no adapter_model.safetensors. Set model.adapter to a folder that "
            "PEFT saved with safetensors; convert an adapter_model.bin by loading and saving it."
        )
    return tensors_of([file])


def tensor_sha256(tensor: StoredTensor) -> str:
    """Digest of a tensor's raw bytes."""
    digest = hashlib.sha256()
    for block in stored_bytes(tensor):
        digest.update(block)
    return digest.hexdigest()


def stored_bytes(tensor: StoredTensor) -> Iterator[bytes]:
    """A tensor's raw bytes, in blocks."""
    left = tensor.num_bytes
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left > 0:
            block = stream.read(min(READ_BYTES, left))
            if not block:
                raise UsageError(f"{tensor.file}: the file is truncated. Copy it again.")
            yield block
            left -= len(block)


def _weight_files(folder: Path) -> list[Path]:
    """The weight files that a loader reads, in its order of preference.

    Names in the index are checked, because a loader follows any path, and reads other suffixes as
    pickles. The files may be links, as in the Hub's cache.
    """
    index = folder / INDEX
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not index.is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise UsageError(
                f"{folder}: the weights are pickles (.bin or .pt), which can run code when read. "
                "Convert them once: load the model you trust and save_pretrained it again."
            )
        raise UsageError(
            f"{folder}: there is no {SINGLE_FILE} and no {INDEX}. "
            "Set model.path to a folder that holds the weights."
        )
    places = read_json(index).get("weight_map") or {}
    for tensor, name in places.items():
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise UsageError(
                f"{index}: the file of {tensor}, {name!r:.100}, is not the name of a .safetensors "
                "file in this folder. Load the model you trust and save_pretrained it again."
            )
    names = sorted({*places.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise UsageError(
            f"{index}: {len(missing)} of the {len(names)} files in it are missing. "
            f"First: {missing[:10]}. Copy the model folder again."
        )
    return [folder / name for name in names]


def tensors_of(files: list[Path]) -> list[StoredTensor]:
    """Every tensor of these files, sorted by name; only headers are read."""
    found = []
    for file in files:
        try:
            with safe_open(file, "numpy"):  # refuses a damaged or truncated file
                pass
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{file}: damaged or truncated ({error}). Copy the file again."
            ) from None
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            place = file, 8 + length + begin, end - begin
            found.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *place))
    return sorted(found, key=lambda tensor: tensor.name)
