"""The values of single cells, checked; a value that cannot be used is a BadRow with its reason."""

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
LOSS_KEYS = ("loss", "weight")  # of a message: whether it is learned
# ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": ASSISTANT}
_MESSAGES = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
_OBJECTS = re.compile(r"\s*(\[\s*)?\{")
_ROLE = re.compile(r"""["'](role|from)["']\s*:\s*["'](system|user|assistant|tool|human|gpt)["']""")
_SHOWN = 80
_TRUE = {"true", "desirable", "1", "1.0"}
_FALSE = {"false", "undesirable", "0", "0.0"}
LABELS = "true, 1 or desirable, and false, 0 or undesirable"


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
        way = "if it begins with the prompt, take the prompt column out (--map prompt=)"
        if len(completion) == 1:
            way = "data.wrap=chat makes a conversation of the prompt too"
        raise BadRow("schema", f"{column!r} is a conversation but the prompt is text; {way}")
    if isinstance(completion, str):
        completion = ({"role": ASSISTANT, "content": completion},)
    _require_no_prompt(completion, prompt, column)
    if completion[0]["role"] == prompt[-1]["role"] == ASSISTANT:
        _require_continuation(prompt[-1], completion[0], column)
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
        raise BadRow(
            "schema",
            f"{column!r} repeats the prompt; give the answer alone or take the prompt column out "
            "(--map prompt=)",
        )


def _require_continuation(begun: Message, rest: Message, column: str) -> None:
    """Refuses a message that cannot continue the assistant's message at the end of the prompt."""
    if begun.get("tool_calls"):
        raise BadRow("schema", f"{column!r} cannot continue a prompt that ends with calls of tools")
    if is_blank(begun["content"]):
        raise BadRow("empty_prompt", "the last message is an assistant's and empty: take it out")
    if (rest.get("content") or "").startswith(begun["content"]):
        raise BadRow(
            "schema",
            f"{column!r} repeats the prompt's last message; give only what follows it",
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
        return tuple(_message(entry, index, column) for index, entry in enumerate(value))
    if value is None:
        raise BadRow("schema", f"{column!r} is missing or null")
    raise BadRow("schema", f"{column!r} is neither text nor a list of messages: {shown(value)}")


def _conversation_or_text(text: str, column: str) -> Any:
    """The messages in JSON text; any other text unchanged.

    An answer may be a JSON list of other things, or continue after one. What names roles and
    is not JSON is refused: it is a conversation that was cut off, or written with `str`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        return text
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not _ROLE.search(text):
            return text
        raise BadRow(
            "schema",
            f"{column!r} looks like a conversation and is not valid JSON (json.dumps writes it): "
            f"{shown(text)}",
        ) from None
    entries = value if isinstance(value, list) else [value]
    if not any(_is_message(entry) for entry in entries):
        return text
    require_characters(value, column)
    return value


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and any(keys <= entry.keys() for keys in _MESSAGES)


def is_blank(text: Text) -> bool:
    """Whether a text, or every message of a conversation, is blank."""
    if isinstance(text, str):
        return not text or text.isspace()
    return not any(
        message.get("tool_calls") or not is_blank(message.get("content", "")) for message in text
    )


def _message(entry: Any, index: int, column: str) -> Message:
    if not isinstance(entry, dict):
        raise BadRow("schema", f"message {index} of {column!r} is not an object: {shown(entry)}")
    # In columnar files every message has every key that any message has.
    message = {key: value for key, value in entry.items() if value is not None}
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if "role" not in message and {"from", "value"} <= message.keys():
        message = {"role": message.pop("from"), "content": message.pop("value"), **message}
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_blocks(message["content"], index, column)
    for key in ("role", "content"):
        value = message.get(key)
        if type(value) is not str and not (
            key == "content" and value is None and message.get("tool_calls")
        ):
            raise BadRow(
                "schema", f"message {index} of {column!r} has no text as {key!r}: {shown(entry)}"
            )
    if "function_call" in message:
        raise BadRow(
            "schema",
            f"message {index} of {column!r} has a 'function_call', which chat templates do not "
            "know: give it as one of 'tool_calls'",
        )
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise BadRow("schema", f"'tool_calls' in {column!r} is not a list of calls: {shown(calls)}")
    _require_json(calls, column)
    if message["role"] in _ROLES:
        message["role"] = _ROLES[message["role"]]
    return _marked(message, index, column)


def _marked(message: dict[str, Any], index: int, column: str) -> Message:
    """The message, with the mark `loss` if it says that it is not to be learned."""
    marks = {bool(message.pop(key)) for key in LOSS_KEYS if _is_mark(message, key, column)}
    if len(marks) > 1:
        raise BadRow(
            "schema", f"of message {index} of {column!r} 'loss' and 'weight' say different things"
        )
    return {**message, "loss": False} if marks == {False} else message


def unmarked(text: Text) -> Any:
    """A text, or messages without the mark that one of them is not to be learned."""
    messages = () if isinstance(text, str) else text
    for message in messages:
        if "loss" in message:
            return tuple({k: v for k, v in each.items() if k != "loss"} for each in messages)
    return text


def _is_mark(message: Message, key: str, column: str) -> bool:
    """Whether a message says that it is learned, or that it is not."""
    value = message.get(key)
    if value is not None and not (isinstance(value, bool | int | float) and value in (0, 1)):
        raise BadRow(
            "schema",
            f"{key!r} of a message of {column!r} is {shown(value)}: a message is learned (1) or "
            "not (0)",
        )
    return value is not None


def _text_of_blocks(blocks: list[Any], index: int, column: str) -> str:
    """The text of a message whose content is a list of blocks, all of them text."""
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or type(block.get("text")) is not str:
            raise BadRow(
                "schema",
                f"message {index} of {column!r} has no text as 'content', but a block of "
                f"type {shown(kind)}: only blocks with text are read",
            )
    return "".join(block["text"] for block in blocks)


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function") or {}, dict)


def _require_json(value: Any, column: str) -> None:
    """Refuses values that JSON does not have: a template would write their Python repr."""
    if isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            _require_json(entry, column)
    elif value is not None and not isinstance(value, str | int | float):
        raise BadRow(
            "schema",
            f"{column!r} holds a {type(value).__name__}, which is not of JSON: {shown(value)}",
        )


def read_label(value: Any, column: str) -> bool:
    """Whether the completion is desirable."""
    if value is None or value == "":
        raise BadRow("schema", f"{column!r} is missing or null")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else None
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise BadRow("schema", f"{column!r} is not a label ({LABELS}): {shown(value)}")


def read_number(value: Any, column: str) -> float:
    """A finite number, which may be given as text."""
    if value is None or value == "":
        raise BadRow("schema", f"{column!r} is missing or null")
    if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise BadRow("schema", f"{column!r} is not a finite number: {shown(value)}")


def read_list(value: Any, column: str) -> list[Any]:
    """A list of any length, which may be given as JSON text."""
    if type(value) is str and value.lstrip().startswith("["):
        value = parse_json(value, column)
    if isinstance(value, list):
        return value
    if value is None:
        raise BadRow("schema", f"{column!r} is missing or null")
    raise BadRow("schema", f"{column!r} is not a list: {shown(value)}")


def read_tools(value: Any, column: str) -> tuple[Any, ...] | None:
    """The tool descriptions, a list that may be given as JSON text; None if there are none."""
    tools = _from_json(value, column)
    if tools is None or tools == []:
        return None
    if isinstance(tools, list):
        tools = [_from_json(tool, column) for tool in tools]
        if all(map(_is_call, tools)):
            _require_json(tools, column)
            return tuple(tools)
    raise BadRow("schema", f"{column!r} is not a list of tool descriptions: {shown(value)}")


def read_options(value: Any, column: str) -> Mapping[str, Any]:
    """The chat template's options, an object or its JSON text."""
    options = _from_json(value, column)
    if options is None:
        return {}
    if isinstance(options, dict):
        _require_json(options, column)
        return options
    raise BadRow("schema", f"{column!r} is not an object of options: {shown(value)}")


def read_system(value: Any, column: str) -> str:
    """The system message; empty if there is none."""
    if value is None:
        return ""
    if type(value) is str:
        return "" if is_blank(value) else value
    raise BadRow("schema", f"{column!r} is not text: {shown(value)}")


def _from_json(value: Any, column: str) -> Any:
    if type(value) is not str:
        return value
    return parse_json(value, column) if value.strip() else None


def parse_json(text: str, column: str) -> Any:
    """The value of a cell's JSON text."""
    try:
        value = json.loads(text)
    except ValueError:
        raise BadRow("schema", f"{column!r} is not valid JSON: {shown(text)}") from None
    require_characters(value, column)
    return value


def require_characters(value: Any, column: str) -> None:
    """Refuses lone surrogates, which no tokenizer takes and UTF-8 cannot encode."""
    if isinstance(value, str):
        if not value.isascii() and not _is_encodable(value):
            what = "bytes that are not UTF-8 or half a character"
            raise BadRow("schema", f"{column!r} holds {what}: {shown(value)}")
    elif isinstance(value, list):
        for entry in value:
            require_characters(entry, column)
    elif isinstance(value, dict):
        for key, entry in value.items():
            require_characters(key, column)
            require_characters(entry, column)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A value as one short line of printable characters."""
    if isinstance(value, str | bytes):
        value = value[:_SHOWN]
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# Speakers before a colon: at the start of a text, or where a dialogue continues.
_TRANSCRIPT = re.compile(
    r"\A\s*(?:#{1,4} *)?(?:human|user|assistant)\s*:|\n\n(?-i:Human|Assistant):", re.IGNORECASE
)


@dataclass(frozen=True)
class Wrapping:
    """What becomes of plain text (data.wrap): itself, or the messages of a conversation."""

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
        """Refuses text that a template would render for a second time."""
        found = _TRANSCRIPT.search(text) if self.is_chat else None
        marks = [mark for mark in self.control if mark in text] if self.is_chat else []
        if found or marks:
            raise BadRow(
                "schema",
                f"{column!r} holds {found[0].strip() if found else marks[0]!r}: data.wrap=chat "
                "would render it twice. Give its messages, or leave text as it is with "
                "data.wrap=none",
            )

    def require_prompt_column(self, columns: tuple[str, ...]) -> None:
        """Refuses pairs of text without prompts: common first words would become the prompt."""
        if self.is_chat:
            raise BadRow(
                "schema",
                f"{' and '.join(columns)} are text, and where their prompt ends is unknown: "
                "data.wrap=chat needs a column of prompts (--map prompt=NAME)",
            )


UNWRAPPED = Wrapping()


def template_unused(texts: int, things: str) -> str:
    """The note on data of plain text for a model with a chat template, under data.wrap=auto."""
    return (
        f"{counted(texts, things)} of plain text, which no chat template renders, though the model "
        "has one: data.wrap=chat uses it, data.wrap=none leaves text as it is without this line"
    )
