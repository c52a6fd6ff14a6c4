"""Flags of the commands, typed and explained as the settings they stand for."""

from __future__ import annotations

import dataclasses
import inspect
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from ..schemas.config import Config
from ..schemas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def with_flags(
    flags: Mapping[str, str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one flag per setting, and the command their values in its `flags`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = {_parameter_name(flag): setting for flag, setting in flags.items()}

        @wraps(command)
        def run(**values: Any) -> None:
            given = {setting: _meant(values.pop(name), setting) for name, setting in added.items()}
            command(flags=given, **values)

        parameters = [
            *(_parameter(flag, setting) for flag, setting in flags.items()),
            *(parameter for name, parameter in own.parameters.items() if name != "flags"),
        ]
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
    """The value as the setting takes it; typer gives a list that nobody filled as empty."""
    if isinstance(value, list):
        return (parse_map(value) if get_origin(_kind(setting)) is dict else value) or None
    return value


def _parameter(flag: str, setting: str) -> inspect.Parameter:
    section, _, name = setting.partition(".")
    options: Any = getattr(Config(), section)
    meaning = next(field for field in dataclasses.fields(options) if field.name == name)
    kind = _kind(setting)
    option = typer.Option(
        _declared(flag, kind),
        min=meaning.metadata["least"],
        max=meaning.metadata["most"],
        help=_help(meaning.metadata["help"], getattr(options, name)),
    )
    return inspect.Parameter(
        _parameter_name(flag),
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[_as_typed(kind) | None, option],
    )


def _kind(setting: str) -> Any:
    section, _, name = setting.partition(".")
    return get_type_hints(get_type_hints(Config)[section])[name]


def _declared(flag: str, kind: Any) -> str:
    return f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag


def _as_typed(kind: Any) -> Any:
    """What is written after the flag; a map is a list of KEY=VALUE."""
    return list[str] if get_origin(kind) is dict else kind


def _help(meaning: str, default: Any) -> str:
    silent = default in ("", [], {}) or isinstance(default, bool)
    return meaning if silent else f"{meaning} (default {default})"


def _parameter_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
