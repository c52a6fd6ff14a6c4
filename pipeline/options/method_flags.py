"""Flags for the options of methods, which the table of methods declares."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...schemas.config import Config
from ...schemas.errors import UsageError, closest, did_you_mean
from .declared import METHOD, facts_of

DESTINATION = "method_"  # before the name of the option; no flag of a setting begins so


class MethodCommand(TyperCommand):
    """A command with a flag for every option of a method.

    The table of methods is read when the command is, and not for the help of all commands.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of the command, with the flags of methods behind its own."""
        return [*super().get_params(ctx), *_parameters()]

    def invoke(self, ctx: Any) -> Any:
        """Gives the command, for which `method_options` has the flags of methods."""
        names = [name for name in ctx.params if name.startswith(DESTINATION)]
        given = {f"method.{name.removeprefix(DESTINATION)}": ctx.params.pop(name) for name in names}
        ctx.meta[METHOD] = {name: text for name, text in given.items() if text is not None}
        return super().invoke(ctx)


def method_options(context: typer.Context) -> dict[str, str]:
    """The options of methods that were given as flags, by their dotted names, as texts."""
    return dict(context.meta[METHOD])


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


@cache
def _parameters() -> tuple[Any, ...]:
    from ...stages.methods.method_docs import options_of_all
    from ...stages.methods.table import METHODS

    def holder(**_: Any) -> None: ...

    parameters = [
        inspect.Parameter(
            f"{DESTINATION}{name}",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    facts_of(f"method.{name}").flag,
                    help=meaning.replace("[", r"\["),  # else it is a style of the terminal
                    metavar="<value>",
                    rich_help_panel="Options of methods; `align methods NAME` explains them",
                ),
            ],
        )
        for name, meaning in options_of_all(METHODS.values()).items()
    ]
    holder.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(holder)
    return tuple(typer.main.get_command(app).params)
