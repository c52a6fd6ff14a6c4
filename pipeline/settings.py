"""One config out of defaults, align.yaml, the environment, flags and --set."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..schemas.codec import CodecError, from_plain, unknown_key
from ..schemas.config import Config
from ..schemas.errors import UsageError
from ..schemas.safe_text import MASK, hear, masked, masked_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FILE_NAME = "align.yaml"
LARGEST_FILE = 1024 * 1024
# Paths in a config file are meant from where the file lies.
PATHS = (
    "model.path",
    "model.adapter",
    "tokens.chat_template",
    "cache.output",
    "train.cache",
    "train.model",
    "train.output",
    "train.eval_cache",
    "rewards.model",
    "rewards.output",
)
BY_HAND = ("flag", "--set", "ALIGN_MODEL")
PATH_LISTS = ("data.files", "cache.reuse")


@dataclass(frozen=True)
class Settings:
    """A config, and where each value that is not a default came from."""

    config: Config
    origins: dict[str, str]

    def given(self, section: str) -> dict[str, Any]:
        """The settings of one section that somebody wrote down, by their dotted names.

        A default in a file is not counted: `align init` writes all of them.
        """
        values, defaults = flatten(self.config), flatten(Config())
        return {
            name: values[name]
            for name, origin in self.origins.items()
            if name.startswith(f"{section}.")
            and (origin in BY_HAND or values[name] != defaults.get(name))
        }


def load_settings(
    flags: Mapping[str, Any], sets: Sequence[str], *, file: Path | None, data: Sequence[str] = ()
) -> Settings:
    """Later sources win: defaults, config file, environment, flags, --set.

    The file is `file`, or the align.yaml here, beside the data or beside the cache.
    """
    path = file or _beside([*data, *filter(None, [flags.get("train.cache")])])
    layers: list[tuple[str, dict[str, Any]]] = []
    if path:
        layers.append((str(path), _read_file(path)))
    if os.environ.get("ALIGN_MODEL"):
        layers.append(("ALIGN_MODEL", {"model.path": os.environ["ALIGN_MODEL"]}))
    given = {key: value for key, value in flags.items() if value is not None}
    layers.append(("flag", given | ({"data.files": list(data)} if data else {})))
    layers.append(("--set", dict(_parse_set(text) for text in sets)))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    if isinstance(uri := values.get("tracking.uri"), str):
        _require_address(uri, origins["tracking.uri"])
    return Settings(_build(values, origins), origins)


def _require_address(uri: str, origin: str) -> None:
    """Refuses the address in a run's config.yaml where its secret was left out."""
    hear(uri)
    if MASK in uri:
        raise UsageError(
            f"{origin}: tracking.uri is {uri}, and the secret in it was not written down. Give the "
            "whole address: --set tracking.uri=…, or MLFLOW_TRACKING_URI and no tracking.uri."
        )


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return _flat(dataclasses.asdict(config))


def as_yaml(config: Config) -> str:
    """Every setting as a config file that means the same wherever it lies."""
    sections = dataclasses.asdict(config)
    for name, value in as_absolute(config).items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def as_absolute(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, no path depending on where it is read, no secret in it."""
    return without_secrets(_from_where_it_lies(flatten(config), Path.cwd()))


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a file by their dotted names, as `flatten` gives them."""
    return flatten(_build(found := _read_file(path), dict.fromkeys(found, str(path))))


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names as they may be written down and shown."""
    shown = masked(dict(settings))
    if "://" in (uri := settings.get("tracking.uri") or ""):
        shown["tracking.uri"] = masked_address(uri)
    return shown


def template() -> str:
    """The text of a new align.yaml: every setting, its default and what it means."""
    lines = ["# Settings of align. Every value shown is the default; flags win over this file.", ""]
    defaults = Config()
    for section in dataclasses.fields(Config):
        options: Any = getattr(defaults, section.name)
        if dataclasses.is_dataclass(options):
            lines.append(f"{section.name}:  # {(options.__doc__ or '').rstrip('.')}")
            lines += [_template_line(options, field) for field in dataclasses.fields(options)]
            lines.append("")
    return "\n".join(lines)


def _template_line(options: Any, field: dataclasses.Field[Any]) -> str:
    shown = yaml.safe_dump(getattr(options, field.name), default_flow_style=True)
    return f"  {field.name}: {shown.replace('...', '').strip()}  # {field.metadata['help']}"


def parse_varied(texts: Sequence[str]) -> dict[str, list[str]]:
    """`method.beta=0.05,0.1` as {"method.beta": ["0.05", "0.1"]}."""
    varied = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (name and equals and all(values.split(","))):
            raise UsageError(
                f"--vary {text}: expected SETTING=V1,V2, for example method.beta=0.05,0.1."
            )
        varied[name] = values.split(",")
    return varied


def _beside(names: Sequence[str]) -> Path | None:
    """An align.yaml in the current folder, or beside the first of these files and folders."""
    places = [Path(), *(Path(name).parent for name in names[:1])]
    return next((place / FILE_NAME for place in places if (place / FILE_NAME).is_file()), None)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path}: no such config file. `align init` writes one.")
    if path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path}: larger than {LARGEST_FILE:,} bytes; this is no config file.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise UsageError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path}: expected sections such as 'model:', found {content!r:.60}.")
    return _from_where_it_lies(_flat(content or {}), path.parent)


def _from_where_it_lies(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    for name in PATHS:
        if isinstance(values.get(name), str) and values[name]:
            values[name] = str(folder / Path(values[name]).expanduser())
    deepspeed = values.get("train.deepspeed")
    if isinstance(deepspeed, str) and deepspeed.endswith(".json"):  # a file, and not a preset
        values["train.deepspeed"] = str(folder / Path(deepspeed).expanduser())
    for name in PATH_LISTS:
        if isinstance(values.get(name), list):
            values[name] = [str(folder / Path(str(item)).expanduser()) for item in values[name]]
    return values


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names for the settings inside sections; anything else keeps its name."""
    values: dict[str, Any] = {}
    for section, content in sections.items():
        if content is None:
            continue
        if isinstance(content, dict):
            values.update({f"{section}.{name}": value for name, value in content.items()})
        else:
            values[str(section)] = content
    return values


def _parse_set(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: expected NAME=VALUE, for example --set cache.seed=1.")
    default = flatten(Config()).get(name)
    try:
        return name, value if isinstance(default, str) else yaml.load(value, _StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"--set {text}: the value is not readable as YAML.") from error


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    nested: dict[str, Any] = {}
    sections = [field.name for field in dataclasses.fields(Config)]
    for name, value in values.items():
        section, dot, key = name.partition(".")
        if section not in sections:
            raise UsageError(f"{origins[name]}: {unknown_key(section, section, sections)}")
        if not dot:
            raise UsageError(
                f"{origins[name]}: {name} is a section: expected settings in it, "
                f"found {value!r:.60}."
            )
        nested.setdefault(section, {})[key] = value
    try:
        config = from_plain(Config, nested, partial=True)
    except CodecError as error:
        blamed = next((origin for name, origin in origins.items() if name in str(error)), "config")
        raise UsageError(f"{blamed}: {error}") from error
    flat = flatten(config)
    for name, (least, most) in _bounds().items():
        if isinstance(flat[name], float) and not math.isfinite(flat[name]):
            raise UsageError(f"{origins[name]}: {name} is {flat[name]}; it must be finite.")
        side = ""
        if least is not None and flat[name] < least:
            side = f"below {least}"
        if most is not None and flat[name] > most:
            side = f"above {most}"
        if side:
            raise UsageError(f"{origins[name]}: {name} is {flat[name]}; it cannot be {side}.")
    return config


def _bounds() -> dict[str, tuple[float | None, float | None]]:
    """Dotted names of the settings, and the least and the most each may be."""
    defaults = Config()
    return {
        f"{section.name}.{field.name}": (field.metadata["least"], field.metadata["most"])
        for section in dataclasses.fields(Config)
        if dataclasses.is_dataclass(options := getattr(defaults, section.name))
        for field in dataclasses.fields(options)
    }


class _StrictLoader(yaml.SafeLoader):
    """Refuses what a config never needs: aliases, and keys given twice; reads 1e-6 as a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"given twice: {', '.join(sorted(twice))}")
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-6 for text, because there is no point in it.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"),
    list("-+0123456789"),
)
