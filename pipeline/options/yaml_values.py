"""YAML for settings, with the numbers, booleans and null of YAML 1.2."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

# ValueError: a number with too many digits.
UNREADABLE = (yaml.YAMLError, RecursionError, ValueError)


class _Loader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1, where 1e-6 is text, yes is true, 010 is 8 and 1:30 is 90."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # a recursive alias has no end
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(str(key.value) for key, _ in node.value)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise yaml.YAMLError(f"given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)

    def construct_int(self, node: Any) -> int:
        return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that either YAML version reads as another type."""


_Loader.yaml_implicit_resolvers = {}
for _kind, _form in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    for _class in (_Loader, _Dumper):
        _pattern = re.compile(rf"(?:{_form})\Z")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, [None])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


def from_yaml(text: str) -> Any:
    """The value of one document; raises one of UNREADABLE for bad text."""
    return yaml.load(text, _Loader)


def to_yaml(value: Any) -> str:
    """The text of a document."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def in_yaml(value: Any) -> str:
    """A value as YAML in one line."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True).replace("...", "").strip()
