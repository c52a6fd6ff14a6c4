"""The declared facts of every setting, by its dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from ...schemas.config import Config
from ...schemas.option import FACTS, Command, Commands, Facts, Keeper

BOTH: frozenset[Command] = frozenset({"precompute-ref", "train"})  # the stages of `align run`
METHOD = "method.*"  # every option of a method: no field of ours declares them


@cache
def declared() -> Mapping[str, Facts]:
    """The facts of each setting, completed by those of its section, in their order."""
    found: dict[str, Facts] = {}
    for section in fields(Config):
        of_all: Facts = section.metadata[FACTS]
        options = section.default_factory
        if not is_dataclass(options):
            found[METHOD] = _with_both_stages(
                replace(of_all, read_by=(*of_all.on, *of_all.read_by))
            )
            continue
        for each in fields(options):
            facts: Facts = each.metadata[FACTS]
            found[f"{section.name}.{each.name}"] = _with_both_stages(
                replace(
                    facts,
                    flag=(facts.flag or f"--{each.name.replace('_', '-')}") if facts.on else "",
                    read_by=(*facts.read_by, *facts.on, *of_all.read_by),
                    binds=of_all.binds if facts.binds is None else facts.binds,
                )
            )
    return found


def _with_both_stages(facts: Facts) -> Facts:
    """The facts with those for `align run`, which takes what either stage takes."""
    if "run" in facts.instead:
        return facts
    more: Commands = ("run",) if BOTH & {*facts.read_by} else ()
    on = (*facts.on, *(more if BOTH & {*facts.on} else ()))
    return replace(facts, on=on, read_by=(*facts.read_by, *more))


def flag_of(name: str, command: str) -> str:
    """The flag of a setting in this command; empty if it has none there."""
    facts = facts_of(name)
    if command not in facts.on:
        return ""
    return (facts.run_flag if command == "run" else "") or facts.flag


def facts_of(name: str) -> Facts:
    """The facts of one setting."""
    facts = declared()[_declared_as(name)]
    if not name.startswith("method."):
        return facts
    return replace(facts, flag=f"--{name.removeprefix('method.').replace('_', '-')}")


def reads(command: Command, name: str) -> bool:
    """Whether a command uses a setting; rounds give theirs to every other command."""
    return command in ("config", "rounds", *facts_of(name).read_by)


@cache
def paths() -> frozenset[str]:
    """The settings that are paths, which a config file gives from where it is."""
    return frozenset(name for name, facts in declared().items() if facts.is_path)


def binds(name: str, *keepers: Keeper) -> bool:
    """Whether a setting binds one of the keepers; a name that is no setting binds none."""
    facts = declared().get(_declared_as(name), Facts())
    return not {*keepers}.isdisjoint(facts.binds or ())


def bound(settings: Mapping[str, Any], *keepers: Keeper) -> dict[str, str]:
    """What one of the keepers keeps of settings; a mapping says the same in any order."""
    return {
        name: repr(dict(sorted(value.items())) if isinstance(value, dict) else value)
        for name, value in settings.items()
        if binds(name, *keepers)
    }


def set_by(command: Command) -> dict[str, str]:
    """The settings that a command sets itself, each with the one to use instead, if any."""
    return {
        name: facts.instead[command]
        for name, facts in declared().items()
        if command in facts.instead and reads(command, name)
    }


def _declared_as(name: str) -> str:
    return METHOD if name.startswith("method.") else name
