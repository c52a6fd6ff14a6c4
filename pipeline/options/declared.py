"""The declared facts of every setting, by its dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache

from ...schemas.config import Config
from ...schemas.option import FACTS, Command, Facts, Keeper

METHOD = "method.*"  # every option of a method: no field of ours declares them


@cache
def declared() -> Mapping[str, Facts]:
    """The facts of each setting, completed by those of its section, in their order."""
    found: dict[str, Facts] = {}
    for section in fields(Config):
        of_all: Facts = section.metadata[FACTS]
        options = section.default_factory
        if not is_dataclass(options):
            found[METHOD] = of_all
            continue
        for each in fields(options):
            facts: Facts = each.metadata[FACTS]
            found[f"{section.name}.{each.name}"] = replace(
                facts,
                flag=(facts.flag or f"--{each.name.replace('_', '-')}") if facts.on else "",
                read_by=(*facts.read_by, *facts.on, *of_all.read_by),
                binds=of_all.binds if facts.binds is None else facts.binds,
            )
    return found


def facts_of(name: str) -> Facts:
    """The facts of one setting."""
    return declared()[_declared_as(name)]


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


def set_by(command: Command) -> dict[str, str]:
    """The settings that a command sets itself, each with the one to use instead, if any."""
    return {
        name: facts.instead[command]
        for name, facts in declared().items()
        if command in facts.instead and reads(command, name)
    }


def _declared_as(name: str) -> str:
    return METHOD if name.startswith("method.") else name
