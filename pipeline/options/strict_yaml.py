"""YAML as settings are written: values are read as they look; what no config needs is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import Any, get_args, get_type_hints

import yaml

from ...schemas.config import Config
from ...schemas.errors import UsageError

MOST_VALUES = 20_000  # about a second of parsing
# The last of them: a number of too many digits.
UNREADABLE = (yaml.YAMLError, RecursionError, ValueError)


def from_yaml(text: str) -> Any:
    """The value of one document; raises one of UNREADABLE if it is refused."""
    return yaml.load(text, _StrictLoader)


def setting_value(name: str, text: str, *, where: str) -> Any:
    """The value of a setting that is given as text: itself, where the setting is a text."""
    section, _, key = name.partition(".")
    options = getattr(Config(), section, None)
    # One that is true, false or a word is read as the first two are written.
    if isinstance(getattr(options, key, None), str) and not _may_be_switch(options, key):
        return text
    try:
        return from_yaml(text)
    except UNREADABLE as error:
        raise UsageError(f"{where}: the value is not readable as YAML.") from error


def _may_be_switch(options: Any, key: str) -> bool:
    return bool in get_args(get_type_hints(type(options))[key])


class _StrictLoader(yaml.SafeLoader):
    """Refuses what a config never needs: aliases, tags, keys given twice, and many values."""

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if tag := getattr(event, "tag", None):
            raise yaml.YAMLError(f"tags are not allowed: {tag}")
        self.values += 1
        if self.values > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES:,} values")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        counts = Counter(key for key in keys if isinstance(key, Hashable))
        twice = {str(key) for key, count in counts.items() if count > 1}
        if twice:
            raise yaml.YAMLError(f"given twice: {', '.join(sorted(twice))}")
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-6 for text, 1:30 for 90, 010 for 8, and makes a date of 2026-01-31.
_StrictLoader.yaml_implicit_resolvers = {}
for _kind, _form in {
    "null": r"~|null|Null|NULL|",
    "bool": r"(?i:yes|no|true|false|on|off)",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": (
        r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?i:inf)|\.(?i:nan)"
    ),
}.items():
    _tag, _pattern = f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_form})\Z")
    _StrictLoader.add_implicit_resolver(_tag, _pattern, [None])
