"""Flags for settings and for options of methods: made from their models, read as --set is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ...schemas.config import Config
from ...schemas.errors import UsageError, closest, did_you_mean
from .table import fields, flag_of, flags_of, paths, word_of
from .yaml_values import setting_value


def read_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags: of most settings they are texts, read as --set reads them."""
    values = dict(given)
    for name, value in given.items():
        if isinstance(value, str):
            values[name] = setting_value(name, value, where=f"{word_of(name)} {value:.60}")
        elif name in fields() and get_origin(fields()[name].annotation) is dict:
            values[name] = _parse_map(value)
    return values


def _parse_map(texts: Sequence[str]) -> dict[str, str]:
    """`--map prompt=question` as {"prompt": "question"}."""
    columns = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not (ours and equals):
            raise UsageError(f"--map {text}: expected OURS=YOURS, for example prompt=question.")
        columns[ours] = theirs
    return columns


def varied_in(flags: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The flags of a sweep that its runs have different values of, as --vary; and the others.

    Options of methods are among the first with one value too: each method takes those it has.
    """
    of_methods = [name for name in flags if name.startswith("method.")]
    others = [name for name in flags if name not in of_methods and _may_vary(name)]
    varied = [*of_methods, *(name for name in others if "," in flags[name])]
    fixed = {name: value for name, value in flags.items() if name not in varied}
    return [f"{name}={flags[name]}" for name in varied], read_flags(fixed)


def _may_vary(name: str) -> bool:
    """Whether a sweep takes several values behind the flag; a path may hold a comma."""
    kind = fields()[name].annotation
    return kind is not bool and get_origin(kind) not in (list, dict) and name not in paths()


@cache
def setting_flags(command: str) -> Sequence[Any]:
    """The parameters of a command for its settings, each under the name of the setting."""
    flags = flags_of(command).items()
    return typer_parameters(tuple((name, _flag(name, word, command)) for name, word in flags))


@cache
def method_flags(command: str) -> Sequence[Any]:
    """The parameters of a command that trains for the options of all methods."""
    if not flag_of("method.*", command):
        return ()
    from ...stages.methods.method_docs import options_of_all
    from ...stages.methods.table import METHODS

    options = []
    for name, meaning in options_of_all(METHODS.values()).items():
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=meaning.replace("[", r"\["),  # else it is a style of the terminal
            metavar="<value>",
            rich_help_panel="Options of methods; `align methods NAME` explains them",
        )
        options.append((f"method.{name}", Annotated[str | None, option]))
    return typer_parameters(tuple(options))


def _flag(name: str, word: str, command: str) -> Any:
    """What typer makes the flag of; a value is text, which is checked with all other settings."""
    field = fields()[name]
    kind: Any = field.annotation
    text, default = field.description, field.get_default(call_default_factory=True)
    if default not in ("", [], {}) and not isinstance(default, bool):
        text = f"{text} (default {default})"
    if get_origin(kind) is Literal:
        text = f"{', '.join(get_args(kind))}: {text}"
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{word}/--no-{word[2:]}", help=text)]
    placeholder = {int: "<int>", float: "<float>"}.get(kind, "<text>")
    if name in paths():
        placeholder = "<path>"
    if command == "sweep" and _may_vary(name):
        placeholder = "<value,…>"
    typed = list[str] if get_origin(kind) in (list, dict) else str
    return Annotated[typed | None, typer.Option(word, help=text, metavar=placeholder)]


@cache
def typer_parameters(annotated: tuple[tuple[str, Any], ...]) -> Sequence[Any]:
    """What typer makes of annotations; a dot or a dash in a name keeps it from the command."""

    def holder(**_: Any) -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    holder.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(f"flag_{number}", kind, default=None, annotation=one)
            for number, (_, one) in enumerate(annotated)
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(holder)
    made = typer.main.get_command(app).params
    for parameter, (name, _) in zip(made, annotated, strict=True):
        parameter.name = name
    return made


def require_known_options(config: Config) -> None:
    """Refuses options that no method has; whether the one that is asked for has them is its own."""
    if not config.method:  # the table of methods is not read for nothing
        return
    from ...stages.methods.method_docs import options_of_all
    from ...stages.methods.table import METHODS

    known = options_of_all(METHODS.values())
    for name in config.method:
        if (option := name.rpartition(".")[2]) not in known:
            raise UsageError(
                f"method.{name:.60}: no method has such an option."
                f"{did_you_mean(closest(option, known))} `align methods` lists them."
            )
