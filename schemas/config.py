"""Every setting of stage 1, its default, and the sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def option(default: Any, help_text: str, *, least: float | None = None) -> Any:
    """A field with a default, the comment `align init` writes beside it, and a lower bound."""
    metadata = {"help": help_text, "least": least}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelOptions:
    """The frozen reference."""

    path: str = option("", "folder of the reference model (safetensors, config, tokenizer)")
    adapter: str = option("", "folder of a PEFT adapter on top of it; empty for none")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto: the dtype the weights are stored in"
    )
    attention: Literal["auto", "sdpa", "eager"] = option(
        "auto", "auto: sdpa where the model has it, else eager"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda where there is one")
    device_map: str = option("", "spread a large model over devices, as transformers reads it")
    trust_remote_code: bool = option(False, "run Python code found in the model folder")


@dataclass(frozen=True)
class DataOptions:
    """The preference data."""

    files: list[str] = option([], "Parquet, JSONL, JSON, CSV, Arrow files or folders of them")
    map: dict[str, str] = option(
        {}, "our column: yours, for example prompt: question; prompt: '' leaves yours out"
    )
    carry: list[str] = option([], "extra numeric columns to keep in the shards")
    max_bad_frac: float = option(
        0.001, "stop when more than this share of rows is unusable", least=0
    )
    workers: int = option(
        0, "tokenizing processes; 0: one per core when the data is large", least=0
    )


@dataclass(frozen=True)
class TokenOptions:
    """From text to token ids."""

    max_length: int = option(
        2048, "most tokens in prompt + completion; completions lose their end", least=2
    )
    max_prompt_length: int = option(
        0, "most tokens in a prompt; 0: only max_length limits it", least=0
    )
    prompt_side: Literal["left", "right"] = option(
        "left", "where a long prompt is cut: left keeps its end, right keeps its start"
    )
    bos: Literal["auto", "always", "never"] = option(
        "auto", "auto: one BOS when the tokenizer's own rule adds one"
    )
    eos: Literal["append", "never"] = option(
        "append", "append: exactly one EOS at the end of a completion that was not cut"
    )
    boundary: Literal["shift", "strict"] = option(
        "shift",
        "a token spanning prompt and completion: shift counts it to the completion, "
        "strict quarantines the row",
    )
    date: str = option("", "today (YYYY-MM-DD) for chat templates that ask what day it is")
    chat_template: str = option("", "file with a chat template to use instead of the tokenizer's")


@dataclass(frozen=True)
class CacheOptions:
    """What the shards hold and where they lie."""

    output: str = option("align-cache", "folder of the cache")
    kl_pairs: int = option(
        1, "mismatched completions per completion (KTO's KL term); 0: none", least=0
    )
    token_logps: bool = option(False, "also store the log-prob of every token")
    seed: int = option(0, "orders the rows and so chooses the mismatched completions")
    rows_per_shard: int = option(4096, "most rows in one shard", least=1)
    tokens_per_shard: int = option(16_777_216, "most tokens in one shard", least=1)
    reuse: list[str] = option([], "further caches whose scores may be reused")
    reuse_known: bool = option(True, "also reuse from the caches this user made before")


@dataclass(frozen=True)
class ScoringOptions:
    """How the reference is run."""

    tokens_per_batch: int = option(16_384, "most tokens, padding included, in one batch", least=1)


@dataclass(frozen=True)
class TrackingOptions:
    """Where runs are recorded."""

    mlflow: bool = option(True, "record runs in MLflow")
    uri: str = option("", "tracking server; empty: MLFLOW_TRACKING_URI or sqlite:///mlflow.db")
    experiment: str = option("align", "experiment name")
    run_name: str = option("", "run name; empty: chosen by MLflow")


@dataclass(frozen=True)
class Config:
    """One `align.yaml`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    tokens: TokenOptions = field(default_factory=TokenOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    # Settings of stage 2 may stand in the same file; stage 1 neither reads nor depends on them.
    train: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
