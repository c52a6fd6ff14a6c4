"""Makes local copies of models, data and caches from buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ...schemas.config import Config, ModelOptions
from ...stages.storage.cache import Cache
from ...stages.storage.locations import is_remote

# Weights that are never read, because models are loaded only from safetensors.
_UNREAD = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
_OF_SAVED_DATASETS = {"state.json", "dataset_dict.json"}


def with_local_inputs(config: Config) -> Config:
    """The config with each model and data file in a bucket replaced by a local copy."""
    return replace(
        config,
        model=local_options(config.model),
        data=replace(config.data, files=[_local(given, _of_data) for given in config.data.files]),
        rewards=replace(config.rewards, model=local_model(config.rewards.model)),
    )


def local_options(options: ModelOptions) -> ModelOptions:
    """The options of a model whose folder and adapter are on this machine."""
    return replace(options, path=local_model(options.path), adapter=local_model(options.adapter))


def local_model(folder: str) -> str:
    """The folder of a model, or of its copy if it is in a bucket."""
    return _local(folder, _of_model)


def _local(given: str, choose: Callable[[list[str]], list[str]]) -> str:
    if not is_remote(given):
        return given
    from ...stages.storage.copies import fetch_folder  # noqa: PLC0415 - only a bucket needs it

    return str(fetch_folder(given, choose))


def _of_model(names: list[str]) -> list[str]:
    return [name for name in names if "/" not in name and PurePosixPath(name).suffix not in _UNREAD]


def _of_data(names: list[str]) -> list[str]:
    if not _OF_SAVED_DATASETS.isdisjoint(names):  # its JSON files name files in other folders
        return names
    from ...stages.data.files import HUB_FOLDER  # noqa: PLC0415 - as above
    from ...stages.data.readers import ending_of  # noqa: PLC0415

    folders = (".", HUB_FOLDER)
    found = [name for name in names if str(PurePosixPath(name).parent) in folders]
    return [name for name in found if ending_of(name)]


def cache_at(cache: str) -> Cache:
    """The finished cache at a location, or a local copy of it."""
    if not is_remote(cache):
        return Cache(Path(cache))
    from ...stages.storage.copies import fetch_cache  # noqa: PLC0415 - as above

    return Cache(fetch_cache(cache))
