"""Checks of a model's folder: no other weights, no files from elsewhere, no unknown code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....schemas.errors import UsageError
from ....schemas.plain_names import is_plain_name
from .declared_sizes import require_declared_sizes
from .folder_json import read_json, require_plain_files
from .model_folder import adapter_tensors, indexed_files, model_config

# Any other name may stand for a kernel, which transformers fetches from the Hub and runs.
ATTENTION = frozenset({"eager", "sdpa"})
EXPERTS = frozenset({"eager", "grouped_mm", "batched_mm"})
# These are carried out by torch or by a package that the user has installed.
QUANTIZERS = frozenset(
    {"awq", "bitsandbytes", "compressed-tensors", "gptq", "hqq", "mxfp4", "quanto", "torchao"}
)
# Settings of adapters that name what is not in their folder, or make the model another one for
# some of the tokens, which log-probs of whole sequences know nothing of.
UNSUPPORTED = {
    "megatron_config": "import a module of Megatron",
    "adapters": "load the adapters of other folders, or of the Hub",
    "shadow_model": "load a model of another folder, or of the Hub",
    "alora_invocation_tokens": "use the adapter behind certain tokens alone",
    "arrow_config": "choose among adapters token by token",
    "use_bdlora": "cut the adapter into blocks for several devices",
    "kasa_config": "take parts of the base's weights away",
    "monteclora_config": "draw the adapter's weights at random",
}
_ADAPTER_KINDS: tuple[tuple[frozenset[str], tuple[type, ...], str], ...] = (
    (frozenset({"target_modules", "exclude_modules"}), (str, list), "a text or a list"),
    (frozenset({"rank_pattern", "alpha_pattern"}), (dict,), "an object of numbers"),
    (frozenset({"r", "lora_alpha", "lora_dropout"}), (int, float), "a number"),
    (frozenset({"target_parameters", "modules_to_save"}), (list,), "a list of names"),
    (frozenset({"use_rslora", "use_dora", "use_qalora"}), (bool,), "true or false"),
    (frozenset({"lora_bias", "fan_in_fan_out"}), (bool,), "true or false"),
)
_ADAPTER_NUMBERS = ("r", "rank_pattern", "lora_alpha", "alpha_pattern", "lora_dropout")
# The last: a shadow model in its own folder.
_NOTHING: tuple[Any, ...] = (None, False, "", {}, [], "mirror")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_OPENED = re.compile(r"(\w+_)?(vocab|merges|tokenizer|spm|gguf)(_file)?|init_inputs")
# transformers takes such files instead of the ones whose digest names the model.
_SHARDS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def require_plain_folder(folder: str) -> dict[str, Any]:
    """The config.json, which has no setting that loads other weights or unknown code."""
    config, root = model_config(folder), Path(folder)
    require_plain_files(root)
    for name, value in _entries(config):
        _require_known(root / "config.json", name, value)
    if (generation := root / "generation_config.json").exists():
        read_json(generation)
    indexed_files(root)
    if (root / "adapter_config.json").exists():
        raise UsageError(
            f"{root / 'adapter_config.json'}: transformers would put this adapter on the model by "
            "itself. Move it to a folder of its own, and name that by model.adapter."
        )
    if shards := sorted(file.name for file in root.iterdir() if _SHARDS.fullmatch(file.name)):
        raise UsageError(
            f"{root / shards[0]}: transformers would load this and not model.safetensors. Load the "
            "model you trust and save_pretrained it to another folder."
        )
    return config


def require_plain_tokenizer(folder: str) -> None:
    """Refuses a tokenizer whose settings name a file elsewhere, which transformers would read.

    A path that an older transformers left there is allowed where no such file exists.
    """
    require_plain_files(Path(folder))
    for file in (Path(folder) / name for name in TOKENIZER_SETTINGS):
        for key, value in (read_json(file) if file.exists() else {}).items():
            names = value if isinstance(value, list) else [value]
            if key == "fast_tokenizer_files":
                away = [name for name in names if not is_plain_name(name)]
            else:
                away = [name for name in names if _OPENED.fullmatch(key) and _is_away(folder, name)]
            if away:
                raise UsageError(
                    f"{file}: {key} names {away[0]!r:.100}: transformers would read a file that is "
                    "not in this folder. Take the entry out."
                )


def _is_away(folder: str, name: object) -> bool:
    """Whether a file of this name is there, as seen from here or from the folder, but not in it."""
    if not isinstance(name, str):
        return False
    own = Path(os.path.normpath(Path(folder).absolute()))  # wherever links lead
    seen = [Path(os.path.normpath(start / name)) for start in (Path.cwd(), own)]
    # A name may be anything: is_file of a Path raises where it is too long.
    return any(path.parent != own and os.path.isfile(path) for path in seen)  # noqa: PTH113


def require_peft() -> None:
    """Refuses adapters where the package for them is not installed."""
    if find_spec("peft") is None:
        raise UsageError("Adapters and --lora need the package peft. Install it: pip install peft")


def require_adapter(folder: str) -> None:
    """Refuses an adapter folder whose settings name code, or whose tensors are not safetensors."""
    require_peft()
    file = Path(folder) / "adapter_config.json"
    settings = read_json(file)
    for name, does in UNSUPPORTED.items():
        if settings.get(name) not in _NOTHING:
            raise UsageError(
                f"{file}: {name} makes peft {does}, which is not supported. Set model.adapter to "
                "an adapter for a transformers model that is whole in its folder."
            )
    for names, kinds, kind in _ADAPTER_KINDS:
        for name in names & settings.keys():
            if settings[name] is not None and not _is_of(settings[name], kinds):
                raise UsageError(
                    f"{file}: {name} is {settings[name]!r:.60}, and must be {kind}. Set "
                    "model.adapter to a folder as PEFT saved it."
                )
    require_plain_files(Path(folder))
    numbers = {name: settings.get(name) for name in _ADAPTER_NUMBERS}
    require_declared_sizes(file, numbers, adapter_tensors(Path(folder)))


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a setting is of one of these kinds; to Python, true and false are numbers too."""
    if isinstance(value, dict):
        # AdaLoRA keeps which ranks it has left, as lists of true and false.
        return dict in kinds and all(_is_of(item, (int, float, list)) for item in value.values())
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All settings of a config by dotted name, nested ones included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{name}.{key}" if name else key, item
            yield from _entries(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _entries(item, f"{name}[{index}]")


def _require_known(file: Path, name: str, value: Any) -> None:
    key = name.rpartition(".")[2]
    if key.endswith(("attn_implementation", "attn_implementation_internal")):
        _require_names(file, name, value, ATTENTION)
    elif key.endswith(("experts_implementation", "experts_implementation_internal")):
        _require_names(file, name, value, EXPERTS)
    elif key == "quantization_config" and isinstance(value, dict):
        _require_names(file, f"{name}.quant_method", value.get("quant_method"), QUANTIZERS)
    elif key == "transformers_weights" and value:
        raise UsageError(
            f"{file}: {name} is {value!r}: transformers would load that file and not "
            "model.safetensors. Take the entry out."
        )
    elif key == "configuration_files":
        raise UsageError(
            f"{file}: {name} is {value!r:.100}: transformers would read one of these and not "
            "config.json. Take the entry out."
        )
    elif key == "auto_map" and "--" in str(value):
        raise UsageError(
            f"{file}: {name} is {value!r}: code of another repository. Take the entry out."
        )


def _require_names(file: Path, name: str, value: Any, known: frozenset[str]) -> None:
    """Refuses unknown names; a value is one name, or one for each part of the model."""
    for given in value.values() if isinstance(value, dict) else [value]:
        if given is not None and not (isinstance(given, str) and given in known):
            raise UsageError(
                f"{file}: {name} is {given!r}, which may be code that transformers fetches from "
                f"the Hub. Known here: {', '.join(sorted(known))}. Take the entry out, or set it "
                "to one of these."
            )
