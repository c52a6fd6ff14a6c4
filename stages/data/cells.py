"""Checked values of single cells; an unusable value raises BadRow with its reason."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ...schemas.errors import counted
from ...schemas.rows import BadRow, Message, Text

ASSISTANT = "assistant"
_SHOWN = 80


def shown(value: Any) -> str:
    """A value as one short line of printable characters."""
    if isinstance(value, str | bytes):
        value = value[:_SHOWN]
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _wrong(column: str, what: str, value: Any) -> BadRow:
    if value is None or value == "":
        return BadRow("schema", f"{column!r} is missing or null")
    return BadRow("schema", f"{column!r} {what}: {shown(value)}")


# Prompts and completions


def read_prompt(value: Any, column: str) -> Text:
    """A prompt that is not blank."""
    prompt = read_text(value, column)
    if is_blank(prompt):
        raise BadRow("empty_prompt", f"{column!r} is empty: {shown(value)}")
    return prompt


def read_completion(value: Any, column: str, prompt: Text) -> Text:
    """A completion of the prompt's kind; text after a conversation becomes a message."""
    completion = read_text(value, column)
    if is_blank(completion):
        raise BadRow("empty_completion", f"{column!r} is empty: {shown(value)}")
    if isinstance(prompt, str):
        if isinstance(completion, str):
            return completion
        way = "if it begins with the prompt, leave out the prompt column (--map prompt=)"
        if len(completion) == 1:
            way = "data.wrap=chat turns the prompt into a conversation too"
        raise BadRow("schema", f"{column!r} is a conversation but the prompt is text; {way}")
    if isinstance(completion, str):
        completion = ({"role": ASSISTANT, "content": completion},)
    _require_no_prompt(completion, prompt, column)
    begun, rest = prompt[-1], completion[0]
    if rest["role"] == begun["role"] == ASSISTANT:  # the completion continues this message
        if begun.get("tool_calls"):
            raise BadRow("schema", f"{column!r} cannot continue a prompt that ends with tool calls")
        if is_blank(begun["content"]):
            raise BadRow("empty_prompt", "the last message is an assistant's and empty: remove it")
        if (rest.get("content") or "").startswith(begun["content"]):
            what = "repeats the prompt's last message: give only the text after it"
            raise BadRow("schema", f"{column!r} {what}")
    return completion


def _require_no_prompt(completion: tuple[Message, ...], prompt: Text, column: str) -> None:
    """Refuses completions that begin with messages of their prompt."""
    completion, prompt = unmarked(completion), unmarked(prompt)
    repeats = completion[: len(prompt)] == prompt
    if completion[0]["role"] != ASSISTANT:
        ends = (prompt[start:] for start in range(1, len(prompt)))
        repeats |= completion[0]["role"] == "system"
        repeats |= any(completion[: len(end)] == end for end in ends)
    if repeats:
        what = "repeats the prompt: give the answer alone, or leave out the prompt column"
        raise BadRow("schema", f"{column!r} {what} (--map prompt=)")


def is_blank(text: Text) -> bool:
    """Whether a text, or every message of a conversation, is blank."""
    if isinstance(text, str):
        return not text or text.isspace()
    return not any(
        message.get("tool_calls") or not is_blank(message.get("content", "")) for message in text
    )


def read_text(value: Any, column: str) -> Text:
    """Plain text or a conversation, which may be given as JSON text."""
    if type(value) is str:
        value = _conversation_or_text(value, column) if _OBJECTS.match(value) else value
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and _is_message(value):
        value = [value]
    if isinstance(value, list):
        return tuple(_message(one, f"{column}[{index}]") for index, one in enumerate(value))
    raise _wrong(column, "is neither text nor a list of messages", value)


_MESSAGES = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
_OBJECTS = re.compile(r"\s*(\[\s*)?\{")
_ROLE = re.compile(r"""["'](role|from)["']\s*:\s*["'](system|user|assistant|tool|human|gpt)["']""")


def _conversation_or_text(text: str, column: str) -> Any:
    """The messages in JSON text; any other text unchanged.

    An answer may be, or begin with, a JSON list of other things. Text that names roles but is not
    JSON is refused: it is a conversation that was cut off, or written with `str`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        return text
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not _ROLE.search(text):
            return text
        what = "looks like a conversation but is not valid JSON: write it with json.dumps"
        raise _wrong(column, what, text) from None
    if not any(map(_is_message, value if isinstance(value, list) else [value])):
        return text
    require_characters(value, column)
    return value


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and any(keys <= entry.keys() for keys in _MESSAGES)


_ROLES = {"human": "user", "gpt": ASSISTANT}  # as ShareGPT names them


def _message(entry: Any, place: str) -> Message:
    """A message of text and calls; it is marked with `loss` if it is not to be learned."""
    if not isinstance(entry, dict):
        raise _wrong(place, "is not an object", entry)
    # In columnar files every message has the keys of all messages.
    message = {key: value for key, value in entry.items() if value is not None}
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if "role" not in message and {"from", "value"} <= message.keys():
        message = {"role": message.pop("from"), "content": message.pop("value"), **message}
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_blocks(message["content"], place)
    calls = message.get("tool_calls", [])
    for key in ("role", "content"):
        value = message.get(key)
        if type(value) is not str and not (key == "content" and value is None and calls):
            raise _wrong(place, f"has no text as {key!r}", entry)
    if "function_call" in message:
        what = "has a 'function_call', which chat templates do not read: write 'tool_calls'"
        raise _wrong(place, what, entry)
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise _wrong(place, "has 'tool_calls' that are not a list of calls", calls)
    _require_json(calls, place)
    message["role"] = _ROLES.get(message["role"], message["role"])
    return _marked(message, place) if {"loss", "weight"} & message.keys() else message


def _text_of_blocks(blocks: list[Any], place: str) -> str:
    """The text of a message whose content is a list of blocks, all of them text."""
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or type(block.get("text")) is not str:
            raise _wrong(place, "has a block as 'content' that is not text", block)
    return "".join(block["text"] for block in blocks)


def _marked(message: dict[str, Any], place: str) -> Message:
    """The message, with the mark `loss` if its `loss` or `weight` excludes it from learning."""
    marks = [message.pop(key) for key in ("loss", "weight") if key in message]
    if any(mark not in (0, 1) for mark in marks) or marks[1:] not in ([], marks[:1]):
        what = (
            "has a 'loss' or 'weight' that is not 1 (learned) or 0 (not), or both and they differ"
        )
        raise _wrong(place, what, marks)
    return message if marks[0] else {**message, "loss": False}


def unmarked(text: Text) -> Any:
    """A text, or messages without their `loss` marks."""
    messages = () if isinstance(text, str) else text
    for message in messages:
        if "loss" in message:
            return tuple({k: v for k, v in each.items() if k != "loss"} for each in messages)
    return text


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function") or {}, dict)


def _require_json(value: Any, column: str) -> None:
    """Refuses values that are not JSON: a template would write their Python repr."""
    if isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            _require_json(entry, column)
    elif value is not None and not isinstance(value, str | int | float):
        raise _wrong(column, f"holds a {type(value).__name__}, which JSON cannot write", value)


# Labels, numbers, lists, and the parts of a conversation


def read_label(value: Any, column: str) -> bool:
    """Whether the completion is desirable."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else None
    if word in ("true", "desirable", "1", "1.0"):
        return True
    if word in ("false", "undesirable", "0", "0.0"):
        return False
    labels = "true, 1 or desirable, and false, 0 or undesirable"
    raise _wrong(column, f"is not a label ({labels})", value)


def read_number(value: Any, column: str) -> float:
    """A finite number, which may be given as text."""
    if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise _wrong(column, "is not a finite number", value)


def read_list(value: Any, column: str) -> list[Any]:
    """A list of any length, which may be given as JSON text."""
    found: list[Any] | None = _of_kind(value, list, column, "is not a list")
    if found is None:
        raise _wrong(column, "", None)
    return found


def read_tools(value: Any, column: str) -> tuple[Any, ...] | None:
    """The tool descriptions, a list that may be given as JSON text; None if there are none."""
    what = "is not a list of tool descriptions"
    tools = _of_kind(value, list, column, what) or []
    tools = [_of_kind(tool, dict, column, what) for tool in tools]
    if not all(map(_is_call, tools)):
        raise _wrong(column, what, value)
    _require_json(tools, column)
    return tuple(tools) or None


def read_options(value: Any, column: str) -> Mapping[str, Any]:
    """The chat template's options, an object or its JSON text."""
    options = _of_kind(value, dict, column, "is not an object of options") or {}
    _require_json(options, column)
    return options


def read_system(value: Any, column: str) -> str:
    """The system message; empty if there is none."""
    if value is not None and type(value) is not str:
        raise _wrong(column, "is not text", value)
    return "" if not value or is_blank(value) else value


def _of_kind(value: Any, kind: type, column: str, what: str) -> Any:
    """A value of this kind, which may be given as JSON text; None if there is none."""
    if type(value) is str:
        value = parse_json(value, column) if value.strip() else None
    if value is not None and not isinstance(value, kind):
        raise _wrong(column, what, value)
    return value


def parse_json(text: str, column: str) -> Any:
    """The value of a cell's JSON text."""
    try:
        value = json.loads(text)
    except ValueError:
        raise _wrong(column, "is not valid JSON", text) from None
    require_characters(value, column)
    return value


def require_characters(value: Any, column: str) -> None:
    """Refuses lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, str):
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError:
            what = "holds bytes that are not UTF-8, or half a character"
            raise _wrong(column, what, value) from None
    # Python escapes such a character; checking each message by itself is slower.
    elif isinstance(value, dict | list) and "\\ud" in repr(value):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            require_characters(entry, column)


# Plain text


# Speakers before a colon: at the start of a text, or where a dialogue continues.
_TRANSCRIPT = re.compile(
    r"\A\s*(?:#{1,4} *)?(?:human|user|assistant)\s*:|\n\n(?-i:Human|Assistant):", re.IGNORECASE
)


@dataclass(frozen=True)
class Wrapping:
    """The handling of plain text (data.wrap): kept, or turned into messages."""

    is_chat: bool = False
    control: tuple[str, ...] = ()  # markup of the template, if a tokenizer is available

    @staticmethod
    def of(setting: str) -> Wrapping:
        """The wrapping of `data.wrap`, without the markup of a template."""
        return Wrapping(setting == "chat")

    def prompt(self, text: Text, column: str) -> Text:
        """The prompt, as a user's message under chat, without white space at its end."""
        if not self.is_chat or not isinstance(text, str):
            return text
        self.require_unrendered(text, column)
        return ({"role": "user", "content": text.rstrip()},)

    def completion(self, value: Any, column: str, prompt: Text) -> Text:
        """A completion of a prompt, without white space at the start of text."""
        if not self.is_chat or not isinstance(prompt, str):
            return read_completion(value, column, prompt)
        if isinstance(answer := read_text(value, column), str):
            self.require_unrendered(answer, column)
            value = answer.lstrip()
        return read_completion(value, column, ({"role": "user", "content": prompt.rstrip()},))

    def require_unrendered(self, text: str, column: str) -> None:
        """Refuses text that a template has already rendered."""
        if not self.is_chat:
            return
        found = _TRANSCRIPT.search(text)
        marks = [found[0].strip()] if found else [mark for mark in self.control if mark in text]
        if marks:
            raise BadRow(
                "schema",
                f"{column!r} holds {marks[0]!r}: data.wrap=chat would render it twice. Give its "
                "messages, or leave text as it is with data.wrap=none",
            )


UNWRAPPED = Wrapping()


def template_unused(texts: int, things: str) -> str:
    """The note for plain text and a model with a chat template, under data.wrap=auto."""
    return (
        f"{counted(texts, things)} of plain text do not use the model's chat template: "
        "data.wrap=chat applies it, data.wrap=none leaves text as it is without this line"
    )
