"""Merges defaults, align.yaml, the environment, flags and --set into one config."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.json_codec import CodecError, from_plain, json_schema, unknown_key
from ...schemas.option import Command
from ...schemas.safe_text import MASK, mask_secrets_of, masked, masked_address
from ...stages.storage.disk import fs
from ...stages.storage.locations import is_remote
from ...stages.tracking.tracker import require_trackers
from .declared import facts_of, paths, reads
from .flags import require_used
from .other_names import hint
from .strict_yaml import UNREADABLE, from_yaml, setting_value

if TYPE_CHECKING:
    from ...stages.methods.method_docs import Description

FILE_NAME = "align.yaml"
LARGEST_FILE = 1024 * 1024
BY_HAND = ("flag", "--set", "ALIGN_MODEL")


@dataclass(frozen=True)
class Settings:
    """A config, and where each value that is not a default came from."""

    config: Config
    origins: dict[str, str]

    @property
    def on_command(self) -> list[str]:
        """The settings of this command's own flags and --set, by their dotted names."""
        return [name for name, origin in self.origins.items() if origin in ("flag", "--set")]

    def given(self, section: str) -> dict[str, Any]:
        """The settings of one section that the user gave, by their dotted names.

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
    flags: Mapping[str, Any],
    sets: Sequence[str] | Mapping[str, Any],
    *,
    file: Path | None,
    data: Sequence[str] = (),
    near: Sequence[str] = (),
    command: Command = "config",
) -> Settings:
    """Later sources win: defaults, config file, environment, flags, --set.

    The file is `file`, or the align.yaml here, beside the data or beside what is `near`. It serves
    many commands, as the environment does; a flag or --set has to be one that `command` uses.
    """
    path = file or _beside([*data, *near, *filter(None, [flags.get("train.cache")])])
    layers: list[tuple[str, dict[str, Any]]] = []
    if path:
        layers.append((str(path), _read_file(path)))
    if os.environ.get("ALIGN_MODEL"):
        layers.append(("ALIGN_MODEL", {"model.path": os.environ["ALIGN_MODEL"]}))
    given = {key: value for key, value in flags.items() if value is not None}
    layers.append(("flag", given | ({"data.files": list(data)} if data else {})))
    parsed = sets if isinstance(sets, Mapping) else dict(map(_parse_set, sets))
    layers.append(("--set", dict(parsed)))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    if isinstance(uri := values.get("tracking.uri"), str):
        _require_address(uri, origins["tracking.uri"])
    settings = Settings(_build(values, origins), origins)
    if reads(command, "tracking.trackers"):
        require_trackers(settings.config.tracking)
    for name in settings.on_command:
        require_used(command, name, origins[name])
    return settings


def _require_address(uri: str, origin: str) -> None:
    """Refuses the address in a run's config.yaml where its secret was left out."""
    mask_secrets_of(uri)
    if MASK in uri:
        raise UsageError(
            f"{origin}: tracking.uri is {uri}, and the secret in it was not written down. Give the "
            "whole address: --set tracking.uri=…, or MLFLOW_TRACKING_URI and no tracking.uri."
        )


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return _flat(dataclasses.asdict(config))


def as_yaml(config: Config) -> str:
    """Every setting as the text of a config file, with absolute paths."""
    sections = dataclasses.asdict(config)
    for name, value in as_absolute(config).items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def as_absolute(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, with absolute paths and without secrets."""
    return without_secrets(_from_where_it_lies(flatten(config), Path.cwd()))


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a file by their dotted names, as `flatten` gives them."""
    return flatten(_build(found := _read_file(path), dict.fromkeys(found, str(path))))


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, with secrets left out."""
    shown = masked(dict(settings))
    if "://" in (uri := settings.get("tracking.uri") or ""):
        shown["tracking.uri"] = masked_address(uri)
    return shown


def write_template(path: Path, *, schema: bool, method: Description | None = None) -> None:
    """Writes a new config file, and the JSON Schema by which an editor checks and completes it."""
    beside = path.with_name("align.schema.json")
    if schema:
        with fs.new_file(beside, replaces=True) as file:
            file.write(json.dumps(json_schema(Config), indent=2).encode() + b"\n")
    with fs.new_file(path, replaces=False) as file:
        named = f"# yaml-language-server: $schema={beside.name}\n" if schema else ""
        file.write(f"{named}{template(method)}".encode())


def template(method: Description | None = None) -> str:
    """The text of a new align.yaml: every setting, its default and what it means.

    The options of a method are comments: set, they are refused with a method that has none such.
    """
    lines = ["# Settings of align. Every value shown is the default; flags win over this file.", ""]
    defaults = Config()
    for section in dataclasses.fields(Config):
        options: Any = getattr(defaults, section.name)
        if dataclasses.is_dataclass(options):
            lines.append(f"{section.name}:  # {(options.__doc__ or '').rstrip('.')}")
            for field in dataclasses.fields(options):
                value, meaning = getattr(options, field.name), field.metadata["description"]
                if method and (section.name, field.name) == ("train", "method"):
                    value = method.name
                lines.append(f"  {field.name}: {_in_yaml(value)}  # {meaning}")
        elif method:
            lines.append(f"{section.name}:  # Options of {method.name}: remove a # to set one")
            lines += [
                f"  # {one.name}: {_in_yaml(one.default)}  # {one.help}" for one in method.options
            ]
        else:
            lines.append(f"{section.name}:  # Options of the method: `align init --method NAME`")
        lines.append("")
    return "\n".join(lines)


def _in_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).replace("...", "").strip()


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
    folders = [Path(), *(Path(name).parent for name in names[:1] if not is_remote(name))]
    return next((file for folder in folders if os.path.lexists(file := folder / FILE_NAME)), None)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UsageError(f"{path}: no such config file. `align init` writes one.")
    if not path.is_file():
        raise UsageError(f"{path}: not a file. Name a config file as `align init` writes it.")
    if path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path}: larger than {LARGEST_FILE:,} bytes; not a config file.")
    try:
        content = from_yaml(path.read_text(encoding="utf-8"))
    except (*UNREADABLE, UnicodeError) as error:
        raise UsageError(
            f"{path}: not readable as YAML: {' '.join(str(error).split()):.300}"
        ) from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path}: expected sections such as 'model:', found {content!r:.60}.")
    values = _flat(content or {}, str(path))
    for name in paths() & values.keys():
        values[name] = _at_home(values[name], f"{path}: {name}")
    return _from_where_it_lies(values, path.parent)


def _at_home(value: Any, where: str) -> Any:
    """The path with a ~ at its start resolved, as a shell does it for a flag."""
    if isinstance(value, list):
        return [_at_home(item, where) for item in value]
    if not (isinstance(value, str) and value.startswith("~")):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise UsageError(
            f"{where} is {value!r}: that home does not exist. Write it out."
        ) from error


def _from_where_it_lies(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    for name in paths() & values.keys():
        # What train.deepspeed names is a file, and not a preset, when it ends so.
        if name != "train.deepspeed" or str(values[name]).endswith(".json"):
            values[name] = _located(values[name], folder)
    return values


def _located(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_located(item, folder) for item in value]
    if not isinstance(value, str) or not value or is_remote(value):
        return value
    return str(folder / value)


def _flat(sections: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Dotted names for the settings inside sections; anything else keeps its name."""
    pairs: list[tuple[str, Any]] = []
    for section, content in sections.items():
        if isinstance(content, dict):
            pairs += [(f"{section}.{name}", value) for name, value in content.items()]
        elif content is not None:
            pairs.append((str(section), content))
    counts = Counter(name for name, _ in pairs)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise UsageError(f"{where}: given twice: {', '.join(twice)}. Write each of them once.")
    return dict(pairs)


def _parse_set(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"--set {text:.60}: expected NAME=VALUE, for example --set cache.shards=8."
        )
    return name, setting_value(name, value, where=f"--set {text:.60}")


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    nested: dict[str, Any] = {}
    sections = [field.name for field in dataclasses.fields(Config)]
    for name, value in values.items():
        section, dot, key = name.partition(".")
        if name not in sections and section != "method" and (meant := hint(name)):
            raise UsageError(f"{origins[name]}: unknown key '{name}'.{meant}")
        if section not in sections:
            raise UsageError(f"{origins[name]}: {unknown_key(section, section, sections)}")
        if not dot:
            raise UsageError(
                f"{origins[name]}: {name} is a section: expected settings in it, "
                f"found {value!r:.60}."
            )
        nested.setdefault(section, {})[key] = value
    try:
        return from_plain(Config, nested)
    except CodecError as error:
        raise UsageError(_blamed(error, values, origins)) from error


def _blamed(error: CodecError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """The message: what is wrong, which source it came from, and how to give several values."""
    parts = error.where.partition("[")[0].split(".")
    names = [error.where, *(".".join(parts[:depth]) for depth in range(len(parts), 0, -1))]
    name = next((name for name in names if name in origins), "")
    given = values.get(name)
    if origins.get(name) == "--set" and isinstance(given, str) and "," in given:
        return f"--set: {error}. `align sweep --vary {name}={given:.60}` tries several values."
    origin = origins.get(name, "config")
    return f"{facts_of(name).flag if origin == 'flag' else origin}: {error}"
