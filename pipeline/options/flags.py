"""Typed flags of the commands for their settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.option import COMMANDS, Command
from .declared import METHOD, declared, facts_of, flag_of, reads
from .method_flags import method_options
from .strict_yaml import setting_value

Data = Annotated[list[str] | None, typer.Argument(help="Files or folders of preference data.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Config file (default: align.yaml, here or beside the data)."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as train.lr=1e-6.")]
Part = Annotated[
    str | None, typer.Option("--part", help="I/N: only the I-th of N parts, beside the others.")
]

CONTEXT = inspect.Parameter(
    "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)


def with_flags(command: Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the flags of its settings to a command, which gets their values as `flags`.

    Those of methods' options are among them where the app makes it a `MethodCommand`.
    """
    settings = [
        name for name, facts in declared().items() if command in facts.on and name != METHOD
    ]
    has_methods = command in declared()[METHOD].on

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(body, eval_str=True)
        flags = [_parameter(setting, command) for setting in settings]

        @wraps(body)
        def run(**values: Any) -> None:
            given = {
                setting: _meant(values.pop(flag.name), setting)
                for setting, flag in zip(settings, flags, strict=True)
            }
            if has_methods:
                texts = method_options(values.pop(CONTEXT.name))
                given |= texts if command == "sweep" else _read(texts)
            body(flags=given, **values)

        parameters = [
            *flags,
            *([CONTEXT] if has_methods else []),
            *(parameter for name, parameter in own.parameters.items() if name != "flags"),
        ]
        parameters.sort(key=lambda one: one.default is not one.empty)
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def varied_in(flags: Mapping[str, Any]) -> list[str]:
    """Those flags of a sweep that each run has its own value of, as --vary takes them.

    Options of methods are among them with one value too: each method takes those that it has.
    """
    given = {name: text for name, text in flags.items() if text is not None}
    of_methods = [name for name in given if name.startswith("method.")]
    others = [name for name in given if name not in of_methods and _may_vary(name)]
    several = [name for name in others if "," in given[name]]
    return [f"{name}={given[name]}" for name in (*of_methods, *several)]


def fixed_in(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The other flags of a sweep, whose values are the same in all of its runs."""
    varied = {text.partition("=")[0] for text in varied_in(flags)}
    kept = {name: value for name, value in flags.items() if name not in varied}
    texts = {name: text for name, text in kept.items() if text is not None and _may_vary(name)}
    return kept | _read(texts)


def _read(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of flags that are given as texts."""
    return {
        name: setting_value(name, text, where=f"{facts_of(name).flag} {text:.60}")
        for name, text in texts.items()
    }


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """`--map prompt=question` as {"prompt": "question"}."""
    columns = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not (ours and equals):
            raise UsageError(f"--map {text}: expected OURS=YOURS, for example prompt=question.")
        columns[ours] = theirs
    return columns


def _meant(value: Any, setting: str) -> Any:
    """The value for the setting; typer gives an empty list for a flag that was not used."""
    if isinstance(value, list):
        return (parse_map(value) if get_origin(_kind(setting)) is dict else value) or None
    return value


def _parameter(setting: str, command: Command) -> inspect.Parameter:
    section, _, name = setting.partition(".")
    options: Any = getattr(Config(), section)
    meaning = next(field for field in dataclasses.fields(options) if field.name == name)
    kind, flag = _kind(setting), flag_of(setting, command)
    text, default = meaning.metadata["description"], getattr(options, name)
    if default not in ("", [], {}) and not isinstance(default, bool):
        text = f"{text} (default {default})"
    if get_origin(kind) is Literal:
        text = f"{', '.join(get_args(kind))}: {text}"
    several = command == "sweep" and _may_vary(setting)
    option = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag,
        help=text,
        # Short, so that 80 columns have room for the help; the bounds are in the refusal.
        metavar=None if kind is bool else "<value,…>" if several else _placeholder(setting),
    )
    return inspect.Parameter(
        flag.lstrip("-").replace("-", "_"),
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[(str if several else _typed(kind)) | None, option],
    )


def _typed(kind: Any) -> Any:
    """The type that typer reads; choices and bounds are checked with all other settings."""
    if get_origin(kind) in {dict, list}:  # a map is a list of KEY=VALUE
        return list[str]
    return kind if isinstance(kind, type) else str


def _placeholder(setting: str) -> str:
    if facts_of(setting).is_path:
        return "<path>"
    return {int: "<int>", float: "<float>"}.get(_kind(setting), "<text>")


def _may_vary(setting: str) -> bool:
    """Whether a sweep takes several values behind the flag; a path may hold a comma."""
    kind = _kind(setting)
    is_one = kind is not bool and get_origin(kind) not in {list, dict}
    return is_one and not facts_of(setting).is_path


def _kind(setting: str) -> Any:
    section, _, name = setting.partition(".")
    return get_type_hints(get_type_hints(Config)[section])[name]


# What serves in place of a setting is the same for both.
ALIKE: dict[Command, Command] = {"sweep": "train", "run": "train"}


def require_used(command: Command, name: str, origin: str) -> None:
    """Refuses a flag or --set that this command would ignore."""
    if reads(command, name):
        return
    others = [f"`align {other}`" for other in COMMANDS if other != "config" and reads(other, name)]
    facts = facts_of(name)
    served = facts.instead.get(command) or facts.instead.get(ALIKE.get(command, command))
    way = served or f"It is a setting of {', '.join(others)}"
    raise UsageError(f"{origin}: {name} is not used by `align {command}`. {way}.")
