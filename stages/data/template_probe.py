"""The probe of a chat template, by rendering made-up conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...schemas.rows import Message
    from .chat_template import ChatTemplate

MARK = "PROBE"
USER = {"role": "user", "content": "question"}
SAID = {"role": "assistant", "content": MARK}
FOUND = {"role": "tool", "name": "search", "tool_call_id": "call00001", "content": "found"}
_BRACKETED = re.compile(r"<<?[^<>\s]{2,}>>?|\[/?[A-Z_]{2,}\]")  # <|user|>, [INST], <<SYS>>
_ARGUMENTS = {"query": MARK}
_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string", "description": MARK}}}


@dataclass(frozen=True)
class Shown:
    """The forms of a value in which a template writes it correctly."""

    as_object: bool = False  # as JSON, or in a layout of the template's own
    as_text: bool = False  # JSON text, unchanged

    @property
    def in_any_form(self) -> bool:
        """Whether the template writes the value in any form."""
        return self.as_object or self.as_text


def call_of_tool(arguments: Any, content: str | None) -> Message:
    """An assistant's message with a tool call."""
    function = {"name": "search", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def written_around(probe: ChatTemplate, tokens: Iterable[str]) -> tuple[str, ...]:
    """The markup that only the template writes: special tokens, and words in brackets."""
    system = {"role": "system", "content": "rules"}
    turns = (USER, SAID, USER)
    written = probe.probed(turns) + probe.probed((system, *turns))
    of_template = {token for token in tokens if token and token in probe.text + written}
    return tuple(sorted(of_template.union(_BRACKETED.findall(written))))


def shown_arguments(probe: ChatTemplate) -> Shown:
    """The forms in which the template takes the arguments of a tool call."""
    forms = zip(*map(_calls, _both(_ARGUMENTS)), strict=True)
    tools = (None, [next(_tools({"type": "object", "properties": {}}))])
    tried = (
        [probe.probed((USER, call), known) for call in calls]
        for calls, known in product(forms, tools)
    )
    return _first_shown(tried, _ARGUMENTS)


def shown_parameters(probe: ChatTemplate) -> Shown:
    """The forms in which the template takes the parameters of a tool."""
    forms = zip(*map(_tools, _both(_PARAMETERS)), strict=True)
    tried = ([probe.probed((USER,), [tool]) for tool in tools] for tools in forms)
    return _first_shown(tried, _PARAMETERS)


def _calls(arguments: Any) -> Iterator[Message]:
    call = call_of_tool(arguments, "")
    yield call
    yield {**call, "content": None}
    yield {**call, "tool_calls": [call["tool_calls"][0]["function"]]}


def _both(value: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return value, json.dumps(value)


def _tools(parameters: Any) -> Iterator[dict[str, Any]]:
    function = {"name": "search", "description": "searches", "parameters": parameters}
    yield {"type": "function", "function": function}
    yield function


def _first_shown(tried: Iterator[list[str]], value: dict[str, Any]) -> Shown:
    """The forms of the value that are found in the first rendered texts."""
    for of_object, of_text in tried:
        is_python = repr(value) in of_object  # a mistake of the template
        found = Shown(MARK in of_object and not is_python, json.dumps(value) in of_text)
        if found.in_any_form:
            return found
    return Shown()
