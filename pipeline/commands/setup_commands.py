"""The commands that come first: init, config, tiny-world."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .settings_command import Data, SettingsCommand, settings_of
from .terminal import say

app = typer.Typer()
command = partial(app.command, rich_help_panel="Begin")
with_settings = partial(app.command, cls=SettingsCommand, rich_help_panel="Begin")


@command(epilog="Example: align init --method kto --schema")
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("align.yaml"),
    schema: Annotated[
        bool, typer.Option("--schema", help="Also write align.schema.json, for editors.")
    ] = False,
    method: Annotated[
        str, typer.Option("--method", metavar="<name>", help="Set it, and list its own options.")
    ] = "",
) -> None:
    """Write an align.yaml with every setting, its default and what it means."""
    from ...schemas.errors import UsageError
    from ..options.settings import write_template

    if path.exists():
        raise UsageError(f"{path} exists. Remove it first, or name another file.")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder. Make it first, or name another file.")
    described = None
    if method:
        from ...stages.methods.table import find_method

        described = find_method(method)
    write_template(path, schema=schema, method=described)
    say(f"{path} written. Set model.path in it.\nnext: align precompute-ref data.parquet")


@with_settings(epilog="Example: align config --changed")
def config(
    context: typer.Context,
    data: Data = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only the settings that are not at their default.")
    ] = False,
) -> None:
    """Print every setting and where its value comes from."""
    from ...schemas.config import Config
    from ..options.flags import require_known_options
    from ..options.settings import flatten, without_secrets

    settings = settings_of(context, data=data)
    require_known_options(settings.config)
    say("# Later wins: default, config file, environment (ALIGN_MODEL), flag, --set")
    found, defaults = flatten(settings.config), flatten(Config())
    for name, value in without_secrets(found).items():
        if changed and name in defaults and found[name] == defaults[name]:
            continue
        say(f"{name} = {value!r}  ({settings.origins.get(name, 'default')})")


@command("tiny-world", epilog="Example: align tiny-world world --rows 200")
def tiny_world(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    rows: Annotated[int, typer.Option(min=1, help="Preference rows.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed, another world.")] = 0,
) -> None:
    """Make a tiny tokenizer, language model and preference data set to try align on."""
    from ...stages.demo.tiny_world import make_world

    world = make_world(folder, rows=rows, seed=seed)
    say(f"model  {world.model}\ndata   {world.data.paired}")
    say(f"next: align precompute-ref {world.data.paired} --model {world.model}")
