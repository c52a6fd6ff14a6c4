"""Merges defaults, align.yaml, the environment, flags and --set into one config."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from pydantic import ValidationError

from ...schemas.config import Config
from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.json_codec import json_schema
from ...schemas.safe_text import MASK, mask_secrets_of, masked, masked_address
from ...stages.storage.disk import fs
from ...stages.storage.locations import is_remote
from ...stages.tracking.tracker import require_trackers
from .other_names import meant_by
from .table import COMMANDS, INSTEAD, SECTIONS, fields, flag_of, paths, reads
from .yaml_values import UNREADABLE, from_yaml, in_yaml, setting_value, to_yaml

if TYPE_CHECKING:
    from ...stages.methods.method import Method

FILE_NAME = "align.yaml"
LARGEST_FILE = 1024 * 1024  # a file of data is larger, and YAML takes minutes to refuse it
BY_HAND = ("flag", "--set", "ALIGN_MODEL")


@dataclass(frozen=True)
class Settings:
    """A config, and where each value that is not a default came from."""

    config: Config
    origins: dict[str, str]

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
    command: str = "config",
) -> Settings:
    """Later sources win: defaults, config file, environment, flags, --set.

    The file is `file`, or the align.yaml here, beside the data or beside what is `near`. It serves
    many commands, as the environment does; a flag or --set has to be one that `command` uses.
    """
    path = file or _beside([*data, *near, *filter(None, [flags.get("train.cache")])])
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if path:
        layers.append((str(path), _read_file(path)))
    if os.environ.get("ALIGN_MODEL"):
        layers.append(("ALIGN_MODEL", {"model.path": os.environ["ALIGN_MODEL"]}))
    layers.append(("flag", {**flags, **({"data.files": list(data)} if data else {})}))
    layers.append(("--set", sets if isinstance(sets, Mapping) else dict(map(_parse_set, sets))))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    if isinstance(uri := values.get("tracking.uri"), str):
        _require_address(uri, origins["tracking.uri"])
    settings = Settings(_build(values, origins, command), origins)
    if reads(command, "tracking.trackers"):
        require_trackers(settings.config.tracking)
    for name, origin in origins.items():
        if origin in ("flag", "--set"):
            _require_used(command, name, origin)
    return settings


def _build(values: Mapping[str, Any], origins: Mapping[str, str], command: str) -> Config:
    """The config of these values; what is wrong is one sentence with the setting and its origin."""
    given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        section, _, key = name.partition(".")
        if name in SECTIONS:
            raise UsageError(
                f"{origins[name]}: {name} is a section: expected settings in it, found "
                f"{value!r:.60}."
            )
        if name not in fields() and section != "method":
            meant = meant_by(name) or closest(name, fields())
            hint = did_you_mean(meant) or " `align config` lists all settings."
            raise UsageError(f"{origins[name]}: unknown setting '{name:.60}'.{hint}")
        given[section][key] = value
    built: dict[str, Any] = {"method": given.pop("method")}
    for section, options in given.items():
        try:
            built[section] = SECTIONS[section](**options)
        except ValidationError as error:
            raise UsageError(_blamed(section, error, origins, command)) from error
    return Config(**built)


def _blamed(section: str, error: ValidationError, origins: Mapping[str, str], command: str) -> str:
    """The sentence for the first wrong value of a section: its origin, its name, what it may be."""
    errors = error.errors(include_url=False)
    key, *inside = errors[0]["loc"]
    name = f"{section}.{key}"
    # A value of several types has an error for each of them; an item of a list has its place.
    words = [one["msg"].removeprefix("Input should be ") for one in errors if one["loc"][0] == key]
    expected = " or ".join(dict.fromkeys(words)).replace("a valid boolean", "true or false")
    of_items = get_origin(fields()[name].annotation) in (list, dict)
    place = name + "".join(f"[{step!r}]" for step in inside if of_items and step != "[key]")
    origin = (flag_of(name, command) if origins[name] == "flag" else "") or origins[name]
    found = errors[0]["input"]
    wrong = f"{origin}: {place} should be {expected}, found {found!r:.60}."
    if origin == "--set" and isinstance(found, str) and "," in found:
        return f"{wrong} `align sweep --vary {name}={found:.60}` tries several values."
    return wrong + did_you_mean(closest(str(found), re.findall("'([^']+)'", expected)))


def _require_used(command: str, name: str, origin: str) -> None:
    """Refuses a flag or --set that this command would ignore."""
    if reads(command, name):
        return
    users = [f"`align {one}`" for one in COMMANDS if one != "config" and reads(one, name)]
    way = INSTEAD.get((command, name)) or f"It is a setting of {', '.join(users)}"
    raise UsageError(f"{origin}: {name} is not used by `align {command}`. {way}.")


def _require_address(uri: str, origin: str) -> None:
    """Refuses the address in a run's config.yaml where its secret was left out."""
    mask_secrets_of(uri)
    if MASK in uri:
        raise UsageError(
            f"{origin}: tracking.uri is {uri}, and the secret in it was not written down. Give the "
            "whole address: --set tracking.uri=…, or MLFLOW_TRACKING_URI and no tracking.uri."
        )


def _parse_set(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"--set {text:.60}: expected NAME=VALUE, for example --set cache.shards=8."
        )
    return name, setting_value(name, value, where=f"--set {text:.60}")


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


# A config file.


def _beside(names: Sequence[str]) -> Path | None:
    """An align.yaml in the current folder, or beside the first of these files and folders."""
    folders = [Path(), *(Path(name).parent for name in names[:1] if not is_remote(name))]
    return next((file for folder in folders if os.path.lexists(file := folder / FILE_NAME)), None)


def _read_file(path: Path) -> dict[str, Any]:
    """The settings of a file by their dotted names; paths are resolved from where it lies."""
    if not path.exists():
        raise UsageError(f"{path}: no such config file. `align init` writes one.")
    if not path.is_file() or path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path}: not a config file. Name one as `align init` writes it.")
    try:
        content = from_yaml(path.read_text(encoding="utf-8"))
    except (*UNREADABLE, UnicodeError) as error:
        raise UsageError(
            f"{path}: not readable as YAML: {' '.join(str(error).split()):.300}"
        ) from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path}: expected sections such as 'model:', found {content!r:.60}.")
    return _located(_flat(content or {}, str(path)), path.parent, os.path.expanduser)


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


def _located(
    values: dict[str, Any], folder: Path, home: Callable[[str], str] = str
) -> dict[str, Any]:
    """The settings with their paths from a folder; `home` resolves a ~, which a shell has done."""

    def located(value: Any) -> Any:
        if isinstance(value, list):
            return [located(item) for item in value]
        if not isinstance(value, str) or not value or is_remote(value):
            return value
        return str(folder / home(value))

    for name in paths() & values.keys():
        # What train.deepspeed names is a file, and not a preset, when it ends so.
        if name != "train.deepspeed" or str(values[name]).endswith(".json"):
            values[name] = located(values[name])
    return values


# Settings as they are written down.


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return _flat(dataclasses.asdict(config))


def as_absolute(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, with absolute paths and without secrets."""
    return without_secrets(_located(flatten(config), Path.cwd()))


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, with secrets left out."""
    shown = masked(dict(settings))
    if "://" in (uri := settings.get("tracking.uri") or ""):
        shown["tracking.uri"] = masked_address(uri)
    return shown


def as_yaml(config: Config) -> str:
    """Every setting as the text of a config file, with absolute paths."""
    sections = dataclasses.asdict(config)
    for name, value in as_absolute(config).items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return to_yaml(sections)


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a file by their dotted names, as `flatten` gives them."""
    found = _read_file(path)
    return flatten(_build(found, dict.fromkeys(found, str(path)), "config"))


def write_template(path: Path, *, schema: bool, method: Method | None = None) -> None:
    """Writes a new config file, and the JSON Schema by which an editor checks and completes it."""
    beside = path.with_name("align.schema.json")
    if schema:
        with fs.new_file(beside, replaces=True) as file:
            file.write(json.dumps(json_schema(Config), indent=2).encode() + b"\n")
    with fs.new_file(path, replaces=False) as file:
        named = f"# yaml-language-server: $schema={beside.name}\n" if schema else ""
        file.write(f"{named}{template(method)}".encode())


def template(method: Method | None = None) -> str:
    """The text of a new align.yaml: every setting, its default and what it means.

    The options of a method are comments: set, they are refused with a method that has none such.
    """
    lines = ["# Settings of align. Every value shown is the default; flags win over this file."]
    values = flatten(Config()) | ({"train.method": method.name} if method else {})
    for section, options in SECTIONS.items():
        if section == "method":
            continue
        lines += ["", f"{section}:  # {options.__doc__.rstrip('.')}"]
        for key, field in options.__pydantic_fields__.items():
            value = in_yaml(values[f"{section}.{key}"])
            lines.append(f"  {key}: {value}  # {field.description}")
    if method:
        lines += ["", f"method:  # Options of {method.name}: remove a # to set one"]
        for name, one in method.options.model_fields.items():
            lines.append(f"  # {name}: {in_yaml(one.default)}  # {one.description}")
    else:
        lines += ["", "method:  # Options of the method: `align init --method NAME`"]
    return "\n".join([*lines, ""])
