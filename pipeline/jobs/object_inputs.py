"""Makes local copies of models, data and caches from buckets, and of models and data of the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.safe_text import is_plain_path
from ...stages.storage.cache import Cache
from ...stages.storage.hub import fetch, names_at, pinned
from ...stages.storage.locations import HUB, Kind, is_remote

# Weights that are never read, because models are loaded only from safetensors.
_UNREAD = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
_OF_SAVED_DATASETS = {"state.json", "dataset_dict.json"}
# All that is read of a model on the Hub: no code, and no weights but safetensors.
_SETTINGS = {".json", ".jinja", ".model", ".tiktoken"}  # and tokenizers
_VOCABULARIES = {"vocab.txt", "merges.txt"}
_WEIGHTS = {"adapter_model.safetensors", "value_head.safetensors"}  # beside a model's own


def with_local_inputs(config: Config, *, weights: bool = True) -> Config:
    """The config with local copies of its model, adapter and data."""
    return replace(with_local_data(config), model=local_options(config.model, weights=weights))


def with_local_data(config: Config) -> Config:
    """The config with local copies of its data."""
    of_hub = partial(_hub_data, split=config.data.split)
    files = [_local(one, "dataset", _of_data, of_hub) for one in config.data.files]
    return replace(config, data=replace(config.data, files=files))


def local_options(options: ModelOptions, *, weights: bool = True) -> ModelOptions:
    """The options of a model whose folder and adapter are on this machine."""
    path, adapter = (local_model(one, weights=weights) for one in (options.path, options.adapter))
    return replace(options, path=path, adapter=adapter)


def local_model(folder: str, *, weights: bool = True) -> str:
    """The folder of a model, or of its copy; without its weights, for its tokenizer, if asked."""
    return _local(folder, "model", _of_model, partial(_hub_model, weights=weights))


def _local(
    given: str,
    kind: Kind,
    choose: Callable[[list[str]], list[str]],
    from_hub: Callable[[str], Path],
) -> str:
    if given.startswith(HUB):
        return str(from_hub(pinned(given, kind)))
    if not is_remote(given):
        return given
    from ...stages.storage.copies import fetch_folder  # noqa: PLC0415 - only a bucket needs it

    return str(fetch_folder(given, choose))


def _hub_model(address: str, *, weights: bool) -> Path:
    """The folder of a model or an adapter on the Hub, with the files that are read."""
    from ...stages.model.model_folder import INDEX, SINGLE_FILE, read_json  # noqa: PLC0415

    names = {name for name in names_at(address, "model") if "/" not in name}
    wanted = {name for name in names if PurePosixPath(name).suffix in _SETTINGS}
    wanted |= names & _VOCABULARIES
    if weights:
        stored = names & {SINGLE_FILE, *_WEIGHTS}
        if SINGLE_FILE not in names and INDEX in names:
            index = read_json(fetch(address, "model", [INDEX]) / INDEX)
            stored |= names & {*index.get("weight_map", {}).values()}
        wanted = (wanted | stored) if stored else set()
    if not wanted:
        what = "weights as safetensors" if weights else "tokenizer"
        raise UsageError(
            f"{address} has no {what}. Choose another repository, revision or folder in it."
        )
    return fetch(address, "model", wanted)


def _hub_data(address: str, *, split: str) -> Path:
    """The file or folder of data on the Hub, with the files that are read."""
    from ...stages.data.files import data_files  # noqa: PLC0415
    from ...stages.data.readers import ending_of  # noqa: PLC0415

    _, _, inside = address.partition("@")[2].partition("/")
    root = address.removesuffix(f"/{inside}")
    names = [*filter(is_plain_path, names_at(root, "dataset"))]
    described = {name for name in names if name.rpartition("/")[2] in _OF_SAVED_DATASETS}
    described |= {"README.md"} & {*names}
    # The files of a folder with the same names, so that the Hub's data are read as any folder's.
    with TemporaryDirectory(prefix="align-") as empty:
        for name in names:
            if name in described or ending_of(name):
                Path(empty, name).parent.mkdir(parents=True, exist_ok=True)
                Path(empty, name).touch()
        for name in described:
            shutil.copy(fetch(root, "dataset", [name]) / name, Path(empty, name))
        try:
            wanted = data_files(Path(empty, inside), split)
        except UsageError as error:
            raise UsageError(str(error).replace(empty, root)) from None
        files = [one.relative_to(empty).as_posix() for one in wanted]
    return fetch(root, "dataset", files) / inside


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
