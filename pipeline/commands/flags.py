"""Commands with settings: their flags, --config and --set, and the resulting settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from .terminal import echo, is_first_rank

if TYPE_CHECKING:
    from ...schemas.config import Config
    from ..options.settings import Settings
    from ..parts import Part

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Config file (default: align.yaml, here or beside the data)."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="<name=value>", help="Any setting, such as train.lr=1e-6; repeatable."
    ),
]


class SettingsCommand(TyperCommand):
    """A command with a flag for each of its settings, --config and --set.

    The option models are imported only for the command that runs, not for the general help.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters in the order of the help."""
        own = super().get_params(ctx)
        arguments = [one for one in own if one.param_type_name == "argument"]
        names = {f"--{one.name}" for one in arguments}
        of_settings = [one for one in _parameters(str(self.name)) if one.name not in names]
        return [*arguments, *of_settings, *own[len(arguments) :]]

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; the values of its flags are kept for `settings_of`."""
        given = {name: ctx.params.pop(name) for name in [*ctx.params] if not name.isidentifier()}
        ctx.meta["file"] = given.pop("--config", None)
        ctx.meta["sets"] = given.pop("--set") or []
        ctx.meta["flags"] = {
            name: [*value] if isinstance(value, tuple) else value
            for name, value in given.items()
            if value not in (None, ())  # the flag was not given
        }
        return super().invoke(ctx)


def settings_of(
    context: typer.Context,
    *,
    data: Sequence[str] | None = None,
    near: Sequence[str] = (),
    file: Path | None = None,
) -> Settings:
    """The settings from a command, its files and the environment."""
    from ..options.settings import hub_addresses, load_settings

    command = str(context.command.name)
    settings = load_settings(
        context.meta["flags"],
        context.meta["sets"],
        file=file or context.meta["file"],
        data=data or [],
        near=near,
        command=command,
    )
    if is_first_rank():
        for name, found in hub_addresses(settings.config, command).items():
            echo(f"{name}: {found if isinstance(found, str) else ', '.join(found)}", err=True)
    return settings


def shared_work(
    context: typer.Context,
    part: str | None,
    *,
    data: Sequence[str] | None = None,
    near: Sequence[str] = (),
) -> tuple[Config, Part | None]:
    """The config of work that several processes may share, and the part of this process.

    Only the first rank records the run.
    """
    from ..parts import part_of

    config = settings_of(context, data=data, near=near).config
    if not is_first_rank():
        config = replace(config, tracking=config.tracking.none())
    return config, part_of(part, os.environ)


def takes_several(name: str) -> bool:
    """Whether a sweep takes several values for the flag; a path may contain a comma."""
    from ..options.settings_table import fields, paths

    if name.startswith("method."):
        return True
    kind = fields()[name].annotation
    return kind is not bool and get_origin(kind) not in (list, dict) and name not in paths()


@cache
def _parameters(command: str) -> Sequence[Any]:
    """A parameter for each setting and method option, and for --config and --set."""
    from ..options.settings_table import flag_of, flags_of, word_of

    flags = {name: _flag(name, word, command) for name, word in flags_of(command).items()}
    flags |= {"--config": ConfigFile, "--set": Sets}
    if flag_of("method.*", command):  # importing the methods takes time
        from ...stages.methods.table import options_of_all

        panel = "method: Options of methods; `align methods NAME` explains them"
        for name, meaning in options_of_all().items():
            text = meaning.replace("[", r"\[")  # otherwise rich reads it as a style
            option = typer.Option(
                word_of(name), help=text, metavar="<value>", rich_help_panel=panel
            )
            flags[f"method.{name}"] = Annotated[str | None, option]

    # Typer builds parameters from a function's annotations, whose names have no dot or dash.
    def holder(**_: Any) -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    holder.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(f"flag_{number}", kind, default=None, annotation=one)
            for number, one in enumerate(flags.values())
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(holder)
    made = typer.main.get_command(app).params
    for parameter, name in zip(made, flags, strict=True):
        parameter.name = name
    return made


def _flag(name: str, word: str, command: str) -> Any:
    """Typer's declaration of a flag; its value is text that is checked with all settings."""
    from ..options.settings_table import SECTIONS, fields, paths

    field, section = fields()[name], name.partition(".")[0]
    kind: Any = field.annotation
    text, default = field.description, field.get_default(call_default_factory=True)
    if default not in ("", [], {}) and not isinstance(default, bool):
        text = f"{text} (default {default})"
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        text = f"{', '.join(others)} or {last}; {text}"
    typed: Any = list[str] if get_origin(kind) in (list, dict) else str
    placeholder: str | None = {int: "<int>", float: "<float>"}.get(kind, "<text>")
    if kind is bool:
        typed, placeholder, word = bool, None, f"{word}/--no-{word[2:]}"
    elif name in paths():
        placeholder = "<path>"
    elif command == "sweep" and takes_several(name):
        placeholder = "<value,…>"
    panel = f"{section}: {SECTIONS[section].__doc__.rstrip('.')}"
    option = typer.Option(word, help=text, metavar=placeholder, rich_help_panel=panel)
    return Annotated[typed | None, option]
