"""The option names of other trainers, and the settings that are meant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ...schemas.option import COMMANDS
from .declared import declared, facts_of, flag_of, reads
from .other_configs import OF_CONFIGS
from .other_flags import OF_FLAGS, TheirName

TABLE = (*OF_FLAGS, *OF_CONFIGS)


def meaning_of(name: str) -> str:
    """What another tool's name is here, in sentences; empty for a setting, and for no tool's name.

    So is a setting of ours that is given without its section, or in another one.
    """
    section, _, key = name.partition(".")
    if name in declared() or name in _sections() or (section == "method" and _is_option(key)):
        return ""
    their, settings = _found(name)
    return _told(name, settings, their)


def meaning_of_flag(flag: str, command: str) -> str:
    """The same of a flag that a command does not have, and how to give the setting."""
    their, settings = _found(flag.lstrip("-").replace("-", "_"))
    ways = dict.fromkeys(_way(setting, command) for setting in settings)
    return _told(flag, settings, their, f": pass {' and '.join(ways)}")


def markdown_names() -> str:
    """The table of names, as the documentation shows it."""
    lines = ["| their name | of | `align` | what differs |", "|---|---|---|---|"]
    for their in TABLE:
        cells = (
            ", ".join(f"`{name}`" for name in their.names),
            ", ".join(their.tools),
            _shown(their.settings),
            their.note,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def answer_of(name: str) -> tuple[str, str]:
    """The settings that another tool's option is, as the documentation shows them, and the note."""
    their, settings = _found(name)
    return _shown(settings), their.note if their else ""


@cache
def _by_name() -> dict[str, TheirName]:
    return {name: their for their in TABLE for name in their.names}


def line_of(name: str) -> TheirName | None:
    """The line of the table with this name, or with what is left of it without its sections."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((their for end in ends if (their := _by_name().get(end))), None)


def _found(name: str) -> tuple[TheirName | None, tuple[str, ...]]:
    """The line of a name, and the settings meant; a setting of ours has no line."""
    section, _, last = name.rpartition(".")
    if their := line_of(name):
        return their, their.settings
    if section and section not in _sections():
        return None, ()
    ours = [setting for setting in declared() if setting.rpartition(".")[2] == last]
    return None, tuple(ours) if len(ours) == 1 else ()


def _sections() -> set[str]:
    return {setting.partition(".")[0] for setting in declared()}


def _is_option(key: str) -> bool:
    """Whether methods are asked for an option of this name; which of them has it, they say."""
    their = _by_name().get(key)
    return not their or f"method.{key}" in their.settings


def _told(name: str, settings: Sequence[str], their: TheirName | None, way: str = "") -> str:
    note = f" {their.note}" if their and their.note else ""
    if settings:
        return f"{name} is {' and '.join(settings)} here{way}.{note}"
    return f"{name} has no setting here.{note}" if their else ""


def _shown(settings: Sequence[str]) -> str:
    return " and ".join(f"`{setting}`{_flag(setting)}" for setting in settings)


def _flag(setting: str) -> str:
    flag = facts_of(setting).flag
    return f" (`{flag}`)" if flag else ""


def _way(setting: str, command: str) -> str:
    """How a person gives a setting, to this command if it takes it, else to one that does."""
    on = facts_of(setting).on
    this = [one for one in COMMANDS if one == command]
    likely = (*this, *on) if command in on else (*on, *this, *facts_of(setting).read_by)
    taker = next(one for one in likely if reads(one, setting))
    word = flag_of(setting, taker) or f"--set {setting}=VALUE"
    return word if taker == command else f"{word} to `align {taker}`"
