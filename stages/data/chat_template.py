"""A chat template: the texts that transformers renders with it, and its form of tool calls.

A template that is not Jinja or asks for today's date is refused. A row whose rendering fails is a
bad row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from ...schemas.errors import UsageError
from ...schemas.rows import BadRow, Message, Text, TextRow
from .cells import ASSISTANT, is_blank, parse_json, shown

# A made-up conversation, to find out what a template writes.
MARK = "PROBE"
USER = {"role": "user", "content": "question"}
SAID = {"role": ASSISTANT, "content": MARK}
FOUND = {"role": "tool", "name": "search", "tool_call_id": "call00001", "content": "found"}

_ROLES = ("system", "user", ASSISTANT, "tool")
_TAKEN = {
    *("conversation", "conversations", "messages", "tools", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
}
_DATE = re.compile(r"""strftime_now\(\s*(["'])(?P<form>(?:(?!\1).)*)\1\s*\)""")


class Rendered(NamedTuple):
    """The text of a conversation, and the spans of the assistant that the template marks."""

    text: str
    spans: Sequence[tuple[int, int]]


class ChatTemplate:
    """The template of a model, or one from a user's file; `source` is the file."""

    def __init__(self, text: str, source: str, specials: Mapping[str, Any]) -> None:
        self.text = text
        self._source = source
        self._specials = specials
        self._marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None
        # Every template knows the four roles; others must be named in it.
        self.roles = {*_ROLES, *re.findall(r"""["']([\w-]+)["']""", text)}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **how: bool,
    ) -> Rendered:
        """A conversation as `apply_chat_template` renders it; a failure raises BadRow."""
        options = options or {}
        try:
            if taken := options.keys() & _TAKEN:
                raise ValueError(f"chat_template_kwargs may not set {min(taken)!r}")
            rendered: Any = render_jinja_template(  # texts, and the spans of each
                # `apply_chat_template` leaves out null entries too.
                [[{k: v for k, v in one.items() if v is not None} for one in messages]],
                tools=[*tools] if tools else None,
                chat_template=self.text,
                return_assistant_tokens_mask=self._marks_turns,
                **{**self._specials, **options, **how},
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise BadRow("template_error", f"{type(error).__name__}: {error}"[:200]) from error
        (text,), spans = rendered
        return Rendered(text, spans[0] if spans else ())

    def probe(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text of a made-up conversation; empty if the template refuses it."""
        try:
            return self.render(messages, tools).text
        except BadRow:
            return ""

    @cached_property
    def fault(self) -> str:
        """Why the template cannot be used; empty if it can."""
        try:
            self.render([USER])
        except BadRow as bad:  # this message fails, others may not
            if isinstance(error := bad.__cause__, TemplateSyntaxError):
                return (
                    f"{self._source}: the chat template is not valid Jinja (line {error.lineno}: "
                    f"{error.message}). Correct it, or pass another "
                    "(--set tokens.chat_template=FILE.jinja)."
                )
        # Only testing whether strftime_now exists is harmless.
        lexed = SandboxedEnvironment().lex(self.text)
        code = [(kind, text) for _, kind, text in lexed if kind != "whitespace"]
        if any(
            this == ("name", "strftime_now") and after != ("name", "is")
            for this, after in pairwise([*code, ("", "")])
        ):
            return (
                f"{self._source}: the chat template calls strftime_now, so the same data would "
                "have other tokens tomorrow. Pass --set tokens.date=YYYY-MM-DD if the format in "
                "the call is text in quotes; else pass a template without the call "
                "(--set tokens.chat_template=FILE.jinja)."
            )
        return ""

    @cached_property
    def shows_reasoning(self) -> bool:
        """Whether the template writes an assistant's `reasoning_content`."""
        said = {"role": ASSISTANT, "content": "answer", "reasoning_content": MARK}
        return MARK in self.probe((USER, said))

    @cached_property
    def call_forms(self) -> frozenset[type]:
        """The types in which the template takes the arguments of a tool call."""
        known = [_made_up_tool({"type": "object", "properties": {}})]
        return _forms({"query": MARK}, lambda given: self.probe((USER, made_up_call(given)), known))

    @cached_property
    def tool_forms(self) -> frozenset[type]:
        """The types in which the template takes the parameters of a tool."""
        parameters = {"type": "object", "properties": {"query": {"description": MARK}}}
        return _forms(parameters, lambda given: self.probe((USER,), [_made_up_tool(given)]))

    def fit(self, text_row: TextRow) -> TextRow:
        """The row with its tool calls and tools in a form that the template writes."""
        given = (text_row.prompt, *text_row.completions)
        prompt, *completions = [() if isinstance(text, str) else text for text in given]
        if not text_row.tools and not any(
            message.get("tool_calls") for text in (prompt, *completions) for message in text
        ):
            return text_row
        if not self.call_forms and any(
            text and all(is_blank(message.get("content") or "") for message in text)
            for text in completions
        ):
            raise BadRow(
                "template_error",
                "the completion is only tool calls, which the chat template does not write",
            )

        def fitted(text: Text) -> Text:
            return text if isinstance(text, str) else tuple(map(with_calls, text))

        def with_calls(message: Message) -> Message:
            if not message.get("tool_calls"):
                return message
            calls = [_in_form(call, "arguments", self.call_forms) for call in message["tool_calls"]]
            return {**message, "tool_calls": calls}

        return replace(
            text_row,
            prompt=fitted(text_row.prompt),
            completions=tuple(map(fitted, text_row.completions)),
            tools=text_row.tools
            and tuple(_in_form(tool, "parameters", self.tool_forms) for tool in text_row.tools),
        )


def dated(template: str, day: str) -> str:
    """The template with its calls for the date replaced by a date."""
    try:
        today = date.fromisoformat(day)
    except ValueError as error:
        raise UsageError(f"tokens.date is {day!r}; expected YYYY-MM-DD.") from error
    return _DATE.sub(lambda call: repr(today.strftime(call["form"])), template)


# Templates read a call and a tool with `function` or without it.
def made_up_call(arguments: Any) -> Message:
    """An assistant's message with a tool call."""
    function = {"name": "search", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function, **function}
    return {"role": ASSISTANT, "content": "", "tool_calls": [call]}


def _made_up_tool(parameters: Any) -> dict[str, Any]:
    function = {"name": "search", "description": "searches", "parameters": parameters}
    return {"type": "function", "function": function, **function}


def _forms(value: dict[str, Any], write: Callable[[Any], str]) -> frozenset[type]:
    """The types of a JSON value that a template writes as JSON: object, text, both or neither."""
    text = json.dumps(value)
    of_object, of_text = write(value), write(text)
    # Python's own form of an object is a mistake of the template.
    is_taken = {dict: MARK in of_object and repr(value) not in of_object, str: text in of_text}
    return frozenset(kind for kind, taken in is_taken.items() if taken)


def _in_form(entry: Mapping[str, Any], key: str, forms: frozenset[type]) -> Mapping[str, Any]:
    """A call or a tool with one value, perhaps under `function`, as an object or as text."""
    inner = entry.get("function")
    if isinstance(inner, dict):
        return {**entry, "function": _in_form(inner, key, forms)}
    value = entry.get(key)
    if isinstance(value, str) and forms == {dict}:
        what = f"{key} of {entry.get('name')}"
        try:
            value = parse_json(value, what) if value.strip() else {}  # no arguments
        except RecursionError:
            raise BadRow("schema", f"{what!r} is nested too deeply") from None
        if not isinstance(value, dict):
            raise BadRow("schema", f"{what!r} is not the JSON of an object: {shown(entry[key])}")
    elif isinstance(value, dict) and forms == {str}:
        value = json.dumps(value, ensure_ascii=False)
    return {**entry, key: value} if key in entry else entry


class Conversation:
    """A row's messages under a chat template; each text is rendered once."""

    def __init__(self, text_row: TextRow, chat: ChatTemplate) -> None:
        assert not isinstance(text_row.prompt, str)
        self.text_row = text_row
        self.chat = chat
        self._rendered: dict[tuple[object, ...], Rendered] = {}
        self._prompt: tuple[Message, ...] = text_row.prompt
        self._completions = [each for each in text_row.completions if not isinstance(each, str)]
        # The prompt with each completion, which may continue the prompt's last message.
        self.wholes = [self._joined(completion) for completion in self._completions]

    def _joined(self, completion: tuple[Message, ...]) -> tuple[Message, ...]:
        *before, last = self._prompt
        first = completion[0]
        if not last["role"] == first["role"] == ASSISTANT:
            return (*self._prompt, *completion)
        content = last["content"] + (first.get("content") or "")
        return (*before, {**last, **first, "content": content}, *completion[1:])

    def render(self, messages: Sequence[Message], **how: bool) -> Rendered:
        """Messages as the template writes them with the row's tools and options."""
        key = (*map(id, messages), *how.items())  # the row and `wholes` hold the messages
        if key not in self._rendered:
            options, tools = self.text_row.template_options, self.text_row.tools
            self._rendered[key] = self.chat.render(messages, tools, options, **how)
        return self._rendered[key]

    def texts(self) -> tuple[str, list[str]]:
        """The prompt, and the full text of each completion."""
        for message in (*self._prompt, *chain(*self._completions)):
            if message["role"] not in self.chat.roles:
                raise BadRow(
                    "schema",
                    f"the chat template has no role {message['role']!r}: use one of "
                    f"{', '.join(_ROLES)}, or pass a template that names it (tokens.chat_template)",
                )
        texts = [self.render(whole).text for whole in self.wholes]
        if self._prompt[-1]["role"] != ASSISTANT:
            return self.render(self._prompt, add_generation_prompt=True).text, texts
        continues = {completion[0]["role"] == ASSISTANT for completion in self._completions}
        if len(continues) > 1:
            raise BadRow(
                "schema",
                "some completions continue the prompt's last message, others answer it",
            )
        if continues != {True}:
            return self.render(self._prompt).text, texts
        prompt = self.render(self._prompt, continue_final_message=True).text
        if not all(text.startswith(prompt) for text in texts):
            raise BadRow(
                "template_error",
                "the chat template writes the prompt's last message, an assistant's, differently "
                "when a completion continues it: end the prompt with a user's message",
            )
        return prompt, texts
