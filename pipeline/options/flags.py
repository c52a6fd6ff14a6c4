"""Typed flags of the commands for their settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.option import COMMANDS, Command
from .declared import declared, facts_of, reads

Data = Annotated[list[str] | None, typer.Argument(help="Files or folders of preference data.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Config file (default: align.yaml, here or beside the data)."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any setting: SECTION.NAME=VALUE.")]
Part = Annotated[
    str | None, typer.Option("--part", help="I/N: only the I-th of N parts, beside the others.")
]


def with_flags(command: Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the flags of its settings to a command, which gets their values as `flags`."""

    settings = [name for name, facts in declared().items() if command in facts.on]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(body, eval_str=True)
        flags = [_parameter(setting) for setting in settings]

        @wraps(body)
        def run(**values: Any) -> None:
            given = {
                setting: _meant(values.pop(flag.name), setting)
                for setting, flag in zip(settings, flags, strict=True)
            }
            body(flags=given, **values)

        parameters = [
            *flags,
            *(parameter for name, parameter in own.parameters.items() if name != "flags"),
        ]
        parameters.sort(key=lambda one: one.default is not one.empty)
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


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


def _parameter(setting: str) -> inspect.Parameter:
    section, _, name = setting.partition(".")
    options: Any = getattr(Config(), section)
    meaning = next(field for field in dataclasses.fields(options) if field.name == name)
    kind, flag = _kind(setting), facts_of(setting).flag
    typed = list[str] if get_origin(kind) is dict else kind  # a map is a list of KEY=VALUE
    text, default = meaning.metadata["description"], getattr(options, name)
    if default not in ("", [], {}) and not isinstance(default, bool):
        text = f"{text} (default {default})"
    option = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag,
        min=meaning.metadata["ge"],
        max=meaning.metadata["le"],
        help=text,
    )
    return inspect.Parameter(
        flag.lstrip("-").replace("-", "_"),
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[typed | None, option],
    )


def _kind(setting: str) -> Any:
    section, _, name = setting.partition(".")
    return get_type_hints(get_type_hints(Config)[section])[name]


# What serves in place of a setting is the same for both.
ALIKE: dict[Command, Command] = {"sweep": "train", "score --from-labels": "score"}


def require_used(command: Command, name: str, origin: str) -> None:
    """Refuses a flag or --set that this command would ignore."""
    if reads(command, name):
        return
    others = [f"`align {other}`" for other in COMMANDS if other != "config" and reads(other, name)]
    facts = facts_of(name)
    way = facts.instead.get(ALIKE.get(command, command), f"It is a setting of {', '.join(others)}")
    if origin == "flag":  # only `score` has flags that it does not use in each of its ways
        origin = facts.flag or origin
    raise UsageError(f"{origin}: {name} is not used by `align {command}`. {way}.")
