"""Renders made-up conversations to see what a chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...schemas.rows import Message

MARK = "PROBE"
USER = {"role": "user", "content": "question"}
SAID = {"role": "assistant", "content": MARK}
FOUND = {"role": "tool", "name": "search", "tool_call_id": "call00001", "content": "found"}
_BRACKETED = re.compile(r"<<?[^<>\s]{2,}>>?|\[/?[A-Z_]{2,}\]")  # <|user|>, [INST], <<SYS>>
_ARGUMENTS = {"query": MARK}
_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string", "description": MARK}}}


@dataclass(frozen=True)
class TemplateProbe:
    """A chat template that is tried out."""

    hf: Any
    template: str

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """What it writes; nothing where it refuses such a conversation."""
        try:
            rendered: str = self.hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self.template,
                tokenize=False,
            )
        except Exception:  # a template need not know such turns, and may raise anything
            return ""
        return rendered


@dataclass(frozen=True)
class Shown:
    """In which forms of a value a template writes it as it is meant."""

    as_object: bool = False  # as JSON, or in a layout of the template's own
    as_text: bool = False  # JSON text, as it stands

    @property
    def in_any_form(self) -> bool:
        """Whether it writes the value at all."""
        return self.as_object or self.as_text


def call_of_tool(arguments: Any, content: str | None) -> Message:
    """An assistant's call of a tool."""
    function = {"name": "search", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def written_around(probe: TemplateProbe, tokens: Iterable[str]) -> tuple[str, ...]:
    """What the template alone writes: those of the special tokens, and other words in brackets."""
    system = {"role": "system", "content": "rules"}
    turns = (USER, SAID, USER)
    written = probe.render(turns) + probe.render((system, *turns))
    of_template = {token for token in tokens if token and token in probe.template + written}
    return tuple(sorted(of_template.union(_BRACKETED.findall(written))))


def shown_arguments(probe: TemplateProbe) -> Shown:
    """How the template takes the arguments of a call."""
    forms = zip(*map(_calls, _both(_ARGUMENTS)), strict=True)
    tools = (None, [next(_tools({"type": "object", "properties": {}}))])
    tried = (
        [probe.render((USER, call), known) for call in calls]
        for calls, known in product(forms, tools)
    )
    return _first_shown(tried, _ARGUMENTS)


def shown_parameters(probe: TemplateProbe) -> Shown:
    """How the template takes the parameters of a tool that may be called."""
    forms = zip(*map(_tools, _both(_PARAMETERS)), strict=True)
    tried = ([probe.render((USER,), [tool]) for tool in tools] for tools in forms)
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
    """Reads what became of the value, as an object and as JSON text, where it was first written."""
    for of_object, of_text in tried:
        is_python = repr(value) in of_object  # nobody means that
        found = Shown(MARK in of_object and not is_python, json.dumps(value) in of_text)
        if found.in_any_form:
            return found
    return Shown()
