"""Settings of the preference data: which files, and how their text becomes tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .option import STRICT, PathStr


@dataclass(frozen=True, config=STRICT)
class DataOptions:
    """The preference data."""

    files: list[PathStr] = Field(
        default_factory=list,
        description=(
            "Parquet, JSONL, JSON, CSV, Arrow files, folders of them, or data sets of the Hub"
        ),
    )
    map: dict[str, str] = Field(
        default_factory=dict,
        description="align's column: yours, as prompt: question (prompt=question); '' drops it",
    )
    split: str = Field(
        default="",
        description="the split to read from a folder with several, for example train",
    )
    carry: list[str] = Field(
        default_factory=list, description="extra numeric columns to keep in the shards"
    )
    wrap: Literal["auto", "chat", "none"] = Field(
        default="auto",
        description=(
            "chat: plain text becomes a user's and an assistant's message, for the chat "
            "template; auto and none leave text as it is, and auto logs a line if the model has a "
            "template"
        ),
    )
    max_bad_frac: float = Field(
        default=0.001, ge=0, le=1, description="stop if more than this share of rows is unusable"
    )
    workers: int = Field(
        default=0,
        ge=0,
        description="tokenizing processes; 0: one per usable core when the data is large",
    )


@dataclass(frozen=True, config=STRICT)
class TokenOptions:
    """The conversion of text to token ids."""

    max_length: int = Field(
        default=2048,
        ge=2,
        description="most tokens in prompt + completion; longer completions are cut at the end",
    )
    max_prompt_length: int = Field(
        default=0, ge=0, description="most tokens in a prompt; 0: only max_length limits it"
    )
    prompt_side: Literal["left", "right"] = Field(
        default="left",
        description="where a long prompt is cut: left keeps its end, right keeps its start",
    )
    bos: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="auto: added only if the tokenizer adds one itself, and never twice",
    )
    eos: Literal["append", "never"] = Field(
        default="append",
        description=(
            "append: a completion that was not cut ends once with its template's stop token, "
            "or EOS if the template writes none; never: nothing is added or removed"
        ),
    )
    learn: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description=(
            "learned tokens of a completion of several messages: assistant: the assistant's "
            "turns, except messages with loss: false or weight: 0; last: the last of these "
            "turns; all: every token, also of tools and users"
        ),
    )
    date: str = Field(
        default="", description="today's date (YYYY-MM-DD) for chat templates that print it"
    )
    chat_template: PathStr = Field(
        default="", description="file with a chat template to use instead of the tokenizer's"
    )
