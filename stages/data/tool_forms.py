"""Tool calls and descriptions in the form that a chat template writes correctly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...schemas.rows import BadRow, Message, Record, Text
from .template_probe import Shown, shown_arguments, shown_parameters
from .validate import is_blank, parse_json, shown

if TYPE_CHECKING:
    from .chat_template import ChatTemplate


def uses_tools(record: Record) -> bool:
    """Whether a record describes tools or calls them."""
    return bool(record.tools) or any(
        message.get("tool_calls")
        for text in (record.prompt, *record.completions)
        if not isinstance(text, str)
        for message in text
    )


@dataclass(frozen=True)
class ToolForms:
    """The forms in which a chat template takes JSON: as an object, as text, or as given."""

    arguments: Shown  # of a tool call
    parameters: Shown  # of a tool

    @staticmethod
    def of(probe: ChatTemplate) -> ToolForms:
        """The forms of a template, which is probed."""
        return ToolForms(shown_arguments(probe), shown_parameters(probe))

    def fit(self, record: Record) -> Record:
        """The record with its calls and tools in a form that the template writes correctly."""
        self._require_written(record)
        return replace(
            record,
            prompt=self._text(record.prompt),
            completions=tuple(map(self._text, record.completions)),
            tools=record.tools and tuple(map(self._tool, record.tools)),
        )

    def _require_written(self, record: Record) -> None:
        """Refuses completions of tool calls alone if the template writes none."""
        if self.arguments.in_any_form:
            return
        for completion in record.completions:
            if isinstance(completion, str):
                continue
            if all(is_blank(message.get("content") or "") for message in completion):
                raise BadRow(
                    "template_error",
                    "the completion only calls tools, and the chat template writes no calls",
                )

    def _text(self, text: Text) -> Text:
        return text if isinstance(text, str) else tuple(map(self._message, text))

    def _message(self, message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [*map(self._call, message["tool_calls"])]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        return _within_function(call, "arguments", self.arguments)

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        return _within_function(tool, "parameters", self.parameters)


def _within_function(entry: Mapping[str, Any], key: str, form: Shown) -> dict[str, Any]:
    """A call or a tool with one value in another form, which may be under `function`."""
    inner = entry.get("function")
    if isinstance(inner, dict):
        return {**entry, "function": _within_function(inner, key, form)}
    if key not in entry:
        return dict(entry)
    return {**entry, key: _in_form(entry[key], form, f"{key} of {entry.get('name')}")}


def _in_form(value: Any, form: Shown, what: str) -> Any:
    if isinstance(value, str) and form.as_object and not form.as_text:
        return _parsed(value, what)
    if isinstance(value, dict) and form.as_text and not form.as_object:
        return json.dumps(value, ensure_ascii=False)
    return value


def _parsed(text: str, what: str) -> dict[str, Any]:
    """The object of JSON text; empty for empty text, which some write for no arguments."""
    try:
        value = parse_json(text, what) if text.strip() else {}
    except RecursionError:
        raise BadRow("schema", f"{what!r} is nested too deeply to be read") from None
    if not isinstance(value, dict):
        raise BadRow("schema", f"{what!r} is not JSON text of an object: {shown(text)}")
    return value
