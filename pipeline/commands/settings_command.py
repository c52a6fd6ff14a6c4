"""A command with settings: its flags, --config and --set, and the settings that they give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from ..options.settings import Settings

Data = Annotated[list[str] | None, typer.Argument(help="Files or folders of preference data.")]
Part = Annotated[
    str | None, typer.Option("--part", help="I/N: only the I-th of N parts, beside the others.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Config file (default: align.yaml, here or beside the data)."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as train.lr=1e-6.")]


class SettingsCommand(TyperCommand):
    """A command with a flag for each of its settings, --config and --set.

    The models are imported for the command that is given, and not for the help of all commands.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters in the order of the help."""
        from ..options.flags import method_flags, setting_flags, typer_parameters

        own, command = super().get_params(ctx), str(self.name)
        arguments = [one for one in own if one.param_type_name == "argument"]
        *options, of_help = [one for one in own if one not in arguments]
        shared = typer_parameters((("--config", ConfigFile), ("--set", Sets)))
        if any(one.name == "config" for one in arguments):
            shared = shared[1:]
        flags = setting_flags(command)
        return [*arguments, *flags, *options, *shared, of_help, *method_flags(command)]

    def invoke(self, ctx: Any) -> Any:
        """Gives the command; its flags are kept for `settings_of`."""
        flags = {name: ctx.params.pop(name) for name in [*ctx.params] if "." in name}
        ctx.meta["flags"] = {
            name: [*value] if isinstance(value, tuple) else value
            for name, value in flags.items()
            if value not in (None, ())  # which a flag is that was not given
        }
        ctx.meta["file"] = ctx.params.pop("--config", None)
        ctx.meta["sets"] = ctx.params.pop("--set") or []
        return super().invoke(ctx)


def settings_of(
    context: typer.Context,
    *,
    data: Sequence[str] | None = None,
    near: Sequence[str] = (),
    file: Path | None = None,
) -> Settings:
    """The settings of a command, of its files and of the environment."""
    from ..options.flags import read_flags
    from ..options.settings import load_settings

    return load_settings(
        read_flags(context.meta["flags"]),
        context.meta["sets"],
        file=file or context.meta["file"],
        data=data or [],
        near=near,
        command=str(context.command.name),
    )
