"""The request to a server for one sample, and the validation of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...schemas.json_codec import digest
from ...schemas.rows import Message
from ...schemas.samples import Finish, Prompt, Sampling
from .server_client import BrokenAnswerError, ServerCosts

CHAT, TEXT = "/chat/completions", "/completions"
LIMIT, NEWER_LIMIT = "max_tokens", "max_completion_tokens"
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
_UNFINISHED = frozenset(("abort", "error"))  # of vLLM and SGLang, for requests they gave up


@dataclass(frozen=True)
class Completion:
    """The completion in a server's answer."""

    text: str
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


def path_of(prompt: Prompt) -> str:
    """The API path of a prompt: conversations are rendered by the server, texts are not."""
    return TEXT if isinstance(prompt.text, str) else CHAT


def body_of(
    prompt: Prompt, sampling: Sampling, *, model: str, seed: int, limit: str = LIMIT
) -> dict[str, Any]:
    """The request for one completion; parameters of only some servers are in it only if set."""
    body = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        limit: sampling.max_new_tokens,
        "seed": seed,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if isinstance(prompt.text, str):
        return {**body, "prompt": prompt.text}
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    if prompt.template_options:
        body["chat_template_kwargs"] = dict(prompt.template_options)
    return {**body, "messages": [*map(_as_openai_has_it, prompt.text)]}


def _as_openai_has_it(message: Message) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [*map(_with_text, message["tool_calls"])]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return dict(call)
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def seed_of(sampling_seed: int, prompt: str, number: int) -> int:
    """The seed of one sample: 31 bits, which every server takes."""
    return int(digest(["seed", sampling_seed, prompt, number])[:8], 16) >> 1


def read_completion(answer: Any, *, costs: ServerCosts) -> Completion:
    """The only completion in an answer, whose cost is counted first."""
    usage = field(answer, "usage", dict)
    prompt_tokens: int = field(usage, "prompt_tokens", int)
    completion_tokens: int = field(usage, "completion_tokens", int)
    costs.add(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    choices = field(answer, "choices", list)
    if len(choices) != 1:
        raise BrokenAnswerError(f"{len(choices)} choices where one was asked for")
    finish = field(choices[0], "finish_reason", str)
    if finish in _UNFINISHED:
        raise BrokenAnswerError(f"the server gave this answer up (finish_reason {finish})")
    return Completion(
        _text(choices[0]), _FINISHES.get(finish, "other"), prompt_tokens, completion_tokens
    )


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice; null in a message means none, and so does no text beside a call."""
    if "message" not in choice:
        return text_in(choice, "text")
    message = field(choice, "message", dict)
    if message.get("content") is None and ("content" in message or message.get("tool_calls")):
        return ""
    return text_in(message, "content")


def text_in(record: Any, name: str) -> str:
    """A text of a record in an answer; BrokenAnswerError if it is not encodable."""
    text: str = field(record, name, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BrokenAnswerError(f"{name} is a text that is not valid Unicode") from error
    return text


def field(record: Any, name: str, kind: type) -> Any:
    """A value of a record in an answer; BrokenAnswerError if none of this type is there."""
    value = record.get(name) if isinstance(record, dict) else None
    if value is None:
        raise BrokenAnswerError(f"an answer without {name}")
    if not isinstance(value, kind):
        raise BrokenAnswerError(f"an answer whose {name} is of the type {type(value).__name__}")
    return value
