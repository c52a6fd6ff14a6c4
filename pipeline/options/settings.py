"""Merges defaults, align.yaml, the environment, flags and --set into one config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import ValidationError

from ...schemas.config import Config
from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.option import named_path, wrong_value
from ...schemas.safe_text import MASK, mask_secrets_of, masked, masked_address
from ...stages.storage.hub import pinned
from ...stages.storage.locations import HUB, Kind, address_of, is_remote
from ...stages.tracking.tracker import require_trackers
from .settings_table import COMMANDS, INSTEAD, SECTIONS, fields, flag_of, meant_by, paths, reads
from .yaml_values import UNREADABLE, from_yaml, in_yaml, to_yaml

if TYPE_CHECKING:
    from ...stages.methods.method import Method

FILE_NAME = "align.yaml"
LARGEST_FILE = 1024 * 1024  # larger files are data, which YAML takes minutes to refuse
BY_HAND = ("flag", "--set", "ALIGN_MODEL")
# The settings that may name a repository of the Hub, and its kind.
_MODELS = ("model.path", "model.adapter", "train.model", "rewards.model", "judge.model")
ON_HUB: dict[str, Kind] = {**dict.fromkeys(_MODELS, "model"), "data.files": "dataset"}


@dataclass(frozen=True)
class Settings:
    """A config, and the source of each value that is not a default."""

    config: Config
    origins: dict[str, str]

    def given(self, section: str) -> dict[str, Any]:
        """The settings of one section that the user gave, by dotted name.

        A default in a file does not count, because `align init` writes all defaults.
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
    """Merges defaults, config file, environment, flags and --set; later ones win.

    The file is `file`, or an align.yaml here, beside the data or beside `near`. File and
    environment may have settings of other commands; flags and --set must be used by `command`.
    Addresses of the Hub that it reads are resolved to commits.
    """
    of_flags = {name: _of_flag(name, value, command) for name, value in flags.items()}
    if data:
        of_flags["data.files"] = list(data)
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if path := file or _beside([*data, *near, *filter(None, [flags.get("train.cache")])]):
        layers.append((str(path), _read_file(path)))
    if os.environ.get("ALIGN_MODEL"):
        layers.append(("ALIGN_MODEL", {"model.path": os.environ["ALIGN_MODEL"]}))
    layers.append(("flag", of_flags))
    layers.append(("--set", sets if isinstance(sets, Mapping) else dict(map(_of_set, sets))))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        values.update(_relocated(layer, address_of) if origin in BY_HAND else layer)
        origins.update(dict.fromkeys(layer, origin))
    mask_secrets_of(uri := str(values.get("tracking.uri")))
    if MASK in uri:  # from the config.yaml of a run
        raise UsageError(
            f"{origins['tracking.uri']}: tracking.uri is {uri}, whose secret was masked. Give the "
            "full address with --set tracking.uri=…, or in MLFLOW_TRACKING_URI and no tracking.uri."
        )
    config = _checked(values, origins, command)
    if reads(command, "tracking.trackers"):
        require_trackers(config.tracking)
    for name, origin in origins.items():
        if origin in ("flag", "--set") and not reads(command, name):
            advice = instead_of(name, command)
            raise UsageError(f"{origin}: {name} is not used by `align {command}`. {advice}.")
    if command != "config":  # which is of no command
        config = changed(config, _relocated(hub_addresses(config, command), pinned))
    return Settings(config, origins)


def hub_addresses(config: Config, command: str) -> dict[str, Any]:
    """The models and data that a command reads, by setting, if an address of the Hub is in them."""
    values = flatten(config)
    return {one: values[one] for one in ON_HUB if HUB in str(values[one]) and reads(command, one)}


def instead_of(name: str, command: str) -> str:
    """What to do about a setting that the command would ignore."""
    if (instead := INSTEAD.get(command, {}).get(name)) is not None:
        return f"Use {instead}" if instead else "Leave it out"
    users = [f"`align {one}`" for one in COMMANDS if one != "config" and reads(one, name)]
    return f"It is a setting of {', '.join(users)}"


# The layers.


def _beside(names: Sequence[str]) -> Path | None:
    """An align.yaml in the current folder, or beside the first of these files and folders."""
    folders = [Path(), *(Path(name).parent for name in names[:1] if not is_remote(name))]
    return next((file for folder in folders if os.path.lexists(file := folder / FILE_NAME)), None)


def _read_file(path: Path) -> dict[str, Any]:
    """The settings of a file by dotted name; paths are relative to the file."""
    if not path.exists():
        raise UsageError(f"{path}: no such config file. `align init` writes one.")
    if not path.is_file() or path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path}: not a config file. `align init` writes one.")
    try:
        content = from_yaml(path.read_text(encoding="utf-8"))
    except (*UNREADABLE, UnicodeError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{path}: not readable as YAML: {why:.300}") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path}: write sections such as 'model:', found {content!r:.60}.")
    content = content or {}
    sections = {name: inside for name, inside in content.items() if isinstance(inside, dict)}
    if twice := sorted(_flat(sections).keys() & content.keys()):
        raise UsageError(f"{path}: given twice: {', '.join(twice)}. Write each once.")
    values = _relocated(_flat(content), partial(address_of, folder=path.parent))
    return _located(values, path.parent, os.path.expanduser)


def _relocated(values: Mapping[str, Any], change: Callable[[str, Kind], str]) -> dict[str, Any]:
    """The settings with a change to each model and each file of data."""
    found = dict(values)
    for name, kind in ON_HUB.items():
        value = values.get(name)
        if isinstance(value, str):
            found[name] = change(value, kind)
        elif isinstance(value, list):
            found[name] = [change(one, kind) if isinstance(one, str) else one for one in value]
    return found


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names for the settings in sections; other names are kept."""
    flat: dict[str, Any] = {}
    for section, content in sections.items():
        if isinstance(content, dict):
            flat |= {f"{section}.{name}": value for name, value in content.items()}
        elif content is not None:
            flat[str(section)] = content
    return flat


def _located(
    values: dict[str, Any], folder: Path, home: Callable[[str], str] = str
) -> dict[str, Any]:
    """The settings with paths relative to a folder; `home` resolves a ~."""

    def located(value: Any, *, may_have_name: bool = False) -> Any:
        if isinstance(value, list):
            return [located(item, may_have_name=may_have_name) for item in value]
        if not isinstance(value, str) or not value:
            return value
        name, path = named_path(value) if may_have_name else ("", value)
        found = path if is_remote(path) else str(folder / home(path))
        return f"{name}={found}" if name else found

    for name in paths() & values.keys():
        # A train.deepspeed with this ending is a file rather than a preset.
        if name != "train.deepspeed" or str(values[name]).endswith(".json"):
            values[name] = located(values[name], may_have_name=name == "train.eval_cache")
    return values


def _of_flag(name: str, value: Any, command: str) -> Any:
    """The value of a flag, from a text, a switch, or a list of texts."""
    if isinstance(value, str):
        return _of_text(name, value, f"{flag_of(name, command)} {value:.60}")
    if not isinstance(value, list) or get_origin(fields()[name].annotation) is not dict:
        return value
    columns = {}
    for text in value:
        ours, equals, theirs = text.partition("=")
        if not (ours and equals):
            raise UsageError(f"--map {text}: write OURS=YOURS, for example prompt=question.")
        columns[ours] = theirs
    return columns


def _of_set(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text:.60}: write NAME=VALUE, for example --set cache.shards=8.")
    return name, _of_text(name, value, f"--set {text:.60}")


def _of_text(name: str, text: str, where: str) -> Any:
    """The value of a setting from text: the text itself for a text setting, else YAML.

    A setting that may be text or another type is also read as YAML.
    """
    field = fields().get(name)
    kinds = {*get_args(field.annotation)} if field else set()
    if field and isinstance(field.default, str) and not {bool, float} & kinds:
        return text
    try:
        return from_yaml(text)
    except UNREADABLE as error:
        raise UsageError(f"{where}: the value is not readable as YAML.") from error


# The config of all layers.


def _checked(values: Mapping[str, Any], origins: Mapping[str, str], command: str) -> Config:
    """The config of these values; an error names the setting and its source."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        section, _, key = name.partition(".")
        if name in SECTIONS:
            raise UsageError(
                f"{origins[name]}: {name} is a section: write settings in it, found {value!r:.60}."
            )
        if name not in fields() and section != "method":
            meant = meant_by(name) or closest(name, fields())
            hint = did_you_mean(meant) or " `align config` lists all settings."
            raise UsageError(f"{origins[name]}: unknown setting '{name:.60}'.{hint}")
        sections[section][key] = value
    built: dict[str, Any] = {"method": sections.pop("method")}
    for section, given in sections.items():
        try:
            built[section] = SECTIONS[section](**given)
        except ValidationError as error:
            raise UsageError(_blamed(section, error, origins, command)) from error
    return Config(**built)


def _blamed(section: str, error: ValidationError, origins: Mapping[str, str], command: str) -> str:
    """The message for the first wrong value of a section: source, name, allowed values."""
    first = error.errors(include_url=False)[0]
    key, *inside = first["loc"]
    name, found = f"{section}.{key}", first["input"]
    of_items = get_origin(fields()[name].annotation) in (list, dict)
    place = name + "".join(f"[{step!r}]" for step in inside if of_items and step != "[key]")
    origin = (flag_of(name, command) if origins[name] == "flag" else "") or origins[name]
    wrong = f"{origin}: {place} {wrong_value(error)}"
    if origin == "--set" and isinstance(found, str) and "," in found:
        return f"{wrong} `align sweep --vary {name}={found:.60}` tries several values."
    return wrong


# Settings as text.


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of some settings, or of whole sections."""
    for name, value in changes.items():
        section, _, key = name.partition(".")
        inside = dataclasses.replace(getattr(config, section), **{key: value}) if key else value
        config = dataclasses.replace(config, **{section: inside})
    return config


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return _flat(dataclasses.asdict(config))


def as_absolute(config: Config) -> dict[str, Any]:
    """Every setting by dotted name, with absolute paths and without secrets."""
    return without_secrets(_located(flatten(config), Path.cwd()))


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, without secrets."""
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
    """The settings of a file by dotted name, as from `flatten`."""
    found = _read_file(path)
    return flatten(_checked(found, dict.fromkeys(found, str(path)), "config"))


def recipe(name: str) -> str:
    """The text of an align.yaml for a common case."""
    folder = Path(__file__).parent / "recipes"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise UsageError(f"--recipe {name}: there is no such recipe. Take {', '.join(known)}.")
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def template(method: Method | None) -> str:
    """The text of a new align.yaml: every setting, its default and its meaning.

    Method options are comments, because setting them is an error for methods without them.
    """
    values = flatten(Config()) | ({"train.method": method.name} if method else {})
    lines = ["# Settings of align. Every value shown is the default; flags win over this file."]
    for section, options in SECTIONS.items():
        if section != "method":
            lines += ["", f"{section}:  # {options.__doc__.rstrip('.')}"]
            for key, field in options.__pydantic_fields__.items():
                value = in_yaml(values[f"{section}.{key}"])
                lines.append(f"  {key}: {value}  # {field.description}")
    lines += ["", "method:  # Options of the method: `align init --method NAME`"]
    if method:
        lines[-1] = f"method:  # Options of {method.name}: remove a # to set one"
        for name, field in method.options.model_fields.items():
            lines.append(f"  # {name}: {in_yaml(field.default)}  # {field.description}")
    return "\n".join([*lines, ""])
