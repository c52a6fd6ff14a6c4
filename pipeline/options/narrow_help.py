"""The help of a command in a terminal where a table would cut its words short."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

TABLE_COLUMNS = 80  # what typer's table of options needs
INDENT = 4


class ReadableCommand(TyperCommand):
    """A command whose help can be read at any width."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help, as a table where there is room for one."""
        if not print_narrow(self, ctx):
            super().format_help(ctx, formatter)


def print_narrow(command: Any, ctx: Any) -> bool:
    """In a narrow terminal, prints what each option does below its name; says whether it did."""
    # Here, because they are slow to import and only needed for help.
    from rich.console import Console  # noqa: PLC0415
    from rich.padding import Padding  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    if console.width >= TABLE_COLUMNS:
        return False

    def show(text: str, *, indent: int = 1, style: str = "") -> None:
        # A cell of the table is markup, where a bracket has a backslash before it.
        plain = Text(text.replace(r"\[", "["), style=style)
        console.print(Padding(plain, (0, 1, 0, indent), expand=False))

    show(f"\n{command.get_usage(ctx)}\n", style="bold")
    show("\n\n".join(_paragraphs(command)))
    for title, entries in _sections(command, ctx).items():
        show(f"\n{title}", style="bold")
        for name, meaning in entries:
            show(name, indent=INDENT // 2, style="cyan")
            show(meaning, indent=INDENT)
    if command.epilog:
        show(f"\n{command.epilog}\n")
    return True


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """The parameters and commands under their titles, each with its meaning."""
    found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for one in command.get_params(ctx):
        title = one.rich_help_panel or f"{one.param_type_name.capitalize()}s"
        found.setdefault(title, []).extend(filter(None, [one.get_help_record(ctx)]))
    for name in command.list_commands(ctx) if isinstance(command, TyperGroup) else ():
        one = command.get_command(ctx, name)
        title = one.rich_help_panel or "Commands"
        found.setdefault(title, []).append((name, _paragraphs(one)[0]))
    return {title: entries for title, entries in found.items() if entries}


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(text.split()) for text in (command.help or "").split("\n\n")]
