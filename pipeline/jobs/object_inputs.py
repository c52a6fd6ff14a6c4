"""Local copies of inputs in an object store: models, adapters and data files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...stages.data.data_folders import HUB_FOLDER
from ...stages.data.file_formats import ending_of
from ...stages.storage.bucket.local_copies import local_folder
from ...stages.storage.bucket.objects import (
    ObjectPath,
    below,
    is_remote,
    location,
    object_at,
    version_of,
)
from ...stages.storage.cache.cache_folder import CacheFolder
from ..options.settings import load_settings

# Weights that are never read: a model is loaded from safetensors alone.
_UNREAD = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
_OF_SAVED_DATASETS = {"state.json", "dataset_dict.json"}


def with_local_inputs(config: Config) -> Config:
    """The config with a local copy in place of each model and data file that is in a store."""
    files = [name for given in config.data.files for name in _local_data(given)]
    return replace(
        config,
        model=local_options(config.model),
        data=replace(config.data, files=files),
        rewards=replace(config.rewards, model=local_model(config.rewards.model)),
    )


def cache_at(cache: str) -> CacheFolder:
    """The cache that a command without settings names; of a store, with those of align.yaml."""
    if is_remote(cache):
        load_settings({}, [], file=None)
    return CacheFolder(location(cache))


def local_options(options: ModelOptions) -> ModelOptions:
    """The options of a model whose folder and adapter are on this machine."""
    return replace(options, path=local_model(options.path), adapter=local_model(options.adapter))


def local_model(folder: str) -> str:
    """The folder of a model, or of its copy if it is in a store."""
    root = object_at(folder)
    return _copied(root, _is_of_model, "model folder") if root else folder


def _is_of_model(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix == ".py" or ("/" not in name and path.suffix not in _UNREAD)


def _local_data(given: str) -> Sequence[str]:
    root = object_at(given)
    if root is None:
        return [given]
    if version := version_of(root) if root.key else None:
        return [str(local_folder(root, {"": version}))]
    return [_copied(root, _is_data, "file or folder")]


def _is_data(name: str) -> bool:
    return str(PurePosixPath(name).parent) in (".", HUB_FOLDER) and bool(ending_of(name))


def _copied(root: ObjectPath, is_wanted: Callable[[str], bool], what: str) -> str:
    start = len(root.key) + 1 if root.key else 0
    found = {key[start:]: version for key, version in below(root).items()}
    if not _OF_SAVED_DATASETS.isdisjoint(found):  # it names files in folders of its own
        is_wanted = bool
    wanted = {name: version for name, version in found.items() if is_wanted(name)}
    if not wanted:
        raise UsageError(f"{root}: no such {what}. Check the location.")
    return str(local_folder(root, wanted))
