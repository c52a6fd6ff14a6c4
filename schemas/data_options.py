"""Settings of the preference data: which files, and how their text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .option import IN_TASKS, SCORERS, option


@dataclass(frozen=True)
class DataOptions:
    """The preference data."""

    files: list[str] = option(
        [],
        "Parquet, JSONL, JSON, CSV, Arrow files or folders of them",
        is_path=True,
    )
    map: dict[str, str] = option(
        {},
        "our column: yours, for example prompt: question; prompt: '' leaves yours out",
        on=(*SCORERS, "select", "check"),
    )
    split: str = option(
        "",
        "the split to read of a folder that holds several, for example train",
        on=("check", *IN_TASKS),
    )
    carry: list[str] = option([], "extra numeric columns to keep in the shards")
    wrap: Literal["auto", "chat", "none"] = option(
        "auto",
        "chat: plain text becomes the messages of a user and an assistant, for the chat template; "
        "auto and none leave it as it is, and auto says so where the model has a template",
        read_by=("judge", "select"),
    )
    max_bad_frac: float = option(
        0.001,
        "stop when more than this share of rows is unusable",
        ge=0,
        le=1,
        on=(*SCORERS, "select", "check"),
    )
    workers: int = option(
        0, "tokenizing processes; 0: one per usable core when the data is large", ge=0
    )


@dataclass(frozen=True)
class TokenOptions:
    """From text to token ids."""

    max_length: int = option(
        2048,
        "most tokens in prompt + completion; completions lose their end",
        ge=2,
        on=("precompute-ref", "score", "check"),
    )
    max_prompt_length: int = option(
        0,
        "most tokens in a prompt; 0: only max_length limits it",
        ge=0,
        on=("precompute-ref", "check"),
    )
    prompt_side: Literal["left", "right"] = option(
        "left", "where a long prompt is cut: left keeps its end, right keeps its start"
    )
    bos: Literal["auto", "always", "never"] = option(
        "auto", "auto: added only if the tokenizer adds one itself, and never twice"
    )
    eos: Literal["append", "never"] = option(
        "append",
        "append: a completion that was not cut ends once with the stop token of its template, or "
        "with EOS where it writes none; never: nothing is added or taken away",
    )
    learn: Literal["assistant", "last", "all"] = option(
        "assistant",
        "what of a completion of several messages is learned: assistant: the assistant's turns, "
        "but those whose message says loss: false or weight: 0; last: the last of them; all: every "
        "token, also of tools and users",
        binds=(),
    )
    date: str = option("", "today (YYYY-MM-DD) for chat templates that ask what day it is")
    chat_template: str = option(
        "", "file with a chat template to use instead of the tokenizer's", is_path=True, binds=()
    )
