"""A setting, declared once: its default, help and bounds, its flag, who reads it, what it binds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

# The commands that take settings, in the order in which messages name them.
Command = Literal[
    "config",
    "precompute-ref",
    "score",
    "train",
    "sample",
    "judge",
    "select",
    "check",
    "verify",
    "sweep",
    "plan",
    "run",
    "rounds",
]
Commands: TypeAlias = tuple[Command, ...]
COMMANDS: Commands = get_args(Command)
SCORERS: Commands = ("precompute-ref", "score", "sample", "judge")
IN_TASKS: Commands = ("precompute-ref", "score", "sample")  # which work on data in batches
TRAINERS: Commands = ("train", "plan")
TRAINING: Commands = ("train", "plan", "sweep")
# What keeps its settings: a finished cache, a run that is resumed, a round. With another `length` a
# run is resumed as well, but it is not the run that it would have been without a stop; with another
# `end` it is.
Keeper = Literal["cache", "run", "length", "end", "round"]
Keepers: TypeAlias = tuple[Keeper, ...]

FACTS = "align"  # our only key in the metadata of a field: pydantic acts upon its own


@dataclass(frozen=True)
class Facts:
    """Treatment of a setting, or of a whole section, by the commands."""

    flag: str = ""  # the same word in every command that has it, but for `align run`
    run_flag: str = ""  # there, where a setting of the other stage has the word
    on: Commands = ()  # commands that have the flag, and so read the setting
    read_by: Commands = ()  # the other commands that read it
    is_path: bool = False  # in a config file it is relative to that file
    binds: Keepers | None = None  # None: what the others of its section bind
    # What serves there: a sentence, if the command does not read it; the setting or flag that is to
    # be set, if the command sets it itself.
    instead: Mapping[Command, str] = field(default_factory=dict)


def option(
    default: Any,
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    flag: str = "",
    run_flag: str = "",
    on: Commands = (),
    read_by: Commands = (),
    is_path: bool = False,
    binds: Keepers | None = None,
    instead: Mapping[Command, str] = MappingProxyType({}),
) -> Any:
    """A field with a default, what `align init` and `--help` say of it, its bounds and its facts.

    The flag is the field's name, unless it is given. pydantic reads the metadata, by these names,
    when a value is checked.
    """
    facts = Facts(flag, run_flag, on, read_by, is_path, binds, instead)
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {"description": description, **bounds, FACTS: facts}
    if isinstance(default, list | dict):
        # Neither has a hash, and options are compared by their hash first.
        return field(default_factory=default.copy, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(
    options: Callable[[], Any],
    *,
    on: Commands = (),
    read_by: Commands = (),
    binds: Keepers = (),
) -> Any:
    """A field of options: who reads all of them, and what those bind that say nothing else.

    `on` is for a section whose options are declared elsewhere: commands with a flag for each.
    """
    facts = Facts(on=on, read_by=read_by, binds=binds)
    return field(default_factory=options, metadata={FACTS: facts})
