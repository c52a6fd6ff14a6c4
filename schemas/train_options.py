"""The settings of training: the policy's, and an adapter's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .option import STRICT, NamedPaths, PathStr, Threshold, named_path


@dataclass(frozen=True, config=STRICT)
class TrainOptions:
    """Training of the policy."""

    method: str = Field(default="", description="kto, dpo, orpo, …: `align methods` lists all")
    cache: PathStr = Field(
        default="", description="folder of the cache; empty: the one of cache.output"
    )
    model: PathStr = Field(
        default="", description="folder of the policy; empty: the reference the cache was made with"
    )
    output: PathStr = Field(default="align-run", description="folder of the run")
    epochs: float = Field(
        default=1.0,
        gt=0,
        le=1e12,
        description="times every row is seen; 0.5: half of the rows, in whole steps",
    )
    max_steps: int = Field(
        default=0, ge=0, description="stop after this many optimizer steps; 0: no limit"
    )
    max_time: str = Field(
        default="", description="save and stop after this long, for example 3h30m; empty: no limit"
    )
    batch_size: int = Field(
        default=64, ge=1, description="global batch: rows per optimizer step over all ranks"
    )
    tokens_per_batch: int = Field(
        default=0,
        ge=0,
        description=(
            "micro-batch of a rank, in tokens; 0: 16,384 on a GPU, 2,048 on a CPU, or fewer by "
            "train.memory"
        ),
    )
    lr: float = Field(default=1e-6, ge=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="how the learning rate falls after the warmup"
    )
    min_lr: float = Field(default=0.0, ge=0, le=1, description="final rate, as a share of lr")
    warmup: float = Field(
        default=0.1, ge=0, description="steps in which lr rises; below 1: a share of all steps"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled; not of biases and norms")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="beta1 of AdamW")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="beta2 of AdamW")
    epsilon: float = Field(default=1e-8, ge=0, description="epsilon of AdamW")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="largest gradient norm; larger ones are clipped; 0: never"
    )
    seed: int = Field(default=0, lt=2**63, description="seed of row order and dropout")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: the dtype the policy's weights are stored in"
    )
    dropout: bool = Field(
        default=False, description="keep the dropout that the model's config asks for"
    )
    memory: str | int = Field(
        default="",
        description=(
            "most memory of a GPU, or of the process on a CPU, as 24g, 512m or bytes: auto "
            "settings are chosen to fit; empty: all of the GPU, and no limit on a CPU"
        ),
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="true: less memory, a third more computing; auto: if train.memory needs it",
    )
    checkpoint_offload: bool | Literal["auto"] = Field(
        default="auto",
        description="with gradient_checkpointing: keep the inputs of layers in CPU memory",
    )
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw8bit needs bitsandbytes; a DeepSpeed JSON file may name another",
    )
    optimizer_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of master weights and optimizer states of a bfloat16 policy",
    )
    router_loss: float = Field(
        default=0.0,
        ge=0,
        description="weight of the loss that balances the experts of a mixture; 0: none",
    )
    deepspeed: PathStr = Field(
        default="auto",
        description=(
            "zero0, zero1, zero2, zero3, zero2-offload, zero3-offload, or a DeepSpeed JSON file; "
            "auto: zero1, and zero0 for a single float32 process, or more if train.memory "
            "needs it"
        ),
    )
    pairs_from_scores: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="pairs made of scored rows: the best and the worst of each, or all pairs",
    )
    min_score_gap: float = Field(
        default=0.0, ge=0, description="least difference between the scores of such a pair"
    )
    label_threshold: Threshold = Field(
        default="mean",
        description=(
            "scored completions are desirable above this and undesirable below it: mean or median "
            "of their row, or a number; one that equals it is left out"
        ),
    )
    desirable_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of prompts whose desirable completions KTO and its like learn from",
    )
    undesirable_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="the same for undesirable ones; shares that add up to 1 share no prompt",
    )
    file_weights: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "how often an epoch draws the rows of a data file, for example {prefs.jsonl: 2, old: "
            "0.5}; 0: not at all; files that are not named: once"
        ),
    )
    eval_fraction: float = Field(
        default=0.0, ge=0, le=1, description="share of prompts held out, chosen by their hash"
    )
    eval_cache: NamedPaths = Field(
        default_factory=list,
        description="evaluate on this cache instead; several: PATH or NAME=PATH, for eval/NAME/…",
    )
    eval_every: int = Field(
        default=0, ge=0, description="steps between evaluations; 0: only before and after training"
    )
    eval_table: int = Field(
        default=200,
        ge=0,
        description="rows of a held-out set that each evaluation lists in evaluations/; 0: none",
    )
    eval_text: bool = Field(default=False, description="list them with their text, also in MLflow")
    row_margins: bool = Field(
        default=False,
        description=(
            "log the margin of each training row at each step that runs it, in rows.parquet: it "
            "shows rows that are never learned or forgotten"
        ),
    )
    limit_eval_batches: int = Field(
        default=0, ge=0, description="evaluation batches at most; 0: all"
    )
    log_every: int = Field(default=1, ge=1, description="steps between lines of metrics")
    save_every: int = Field(
        default=0, ge=0, description="steps between checkpoints; 0: by time, and at the end"
    )
    save_minutes: float = Field(
        default=30.0, ge=0, description="minutes between checkpoints, at any step; 0: never"
    )
    keep_last: int = Field(default=2, ge=1, description="number of newest checkpoints to keep")
    best: str = Field(
        default="",
        description=(
            "also keep the checkpoint with the best value, e.g. eval/loss: the lowest loss, "
            "nll, kl, rejected, grad_norm or errors, else the highest; -NAME lowest, +NAME "
            "highest"
        ),
    )
    write_best: bool = Field(
        default=False,
        description="write the model of the best checkpoint (train.best), not of the last step",
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="end the run after this many evaluations without a better train.best; 0: never",
    )
    resume: Literal["never", "auto"] = Field(
        default="never", description="auto: continue from the newest checkpoint"
    )
    other_reference: bool = Field(
        default=False,
        description="let the policy start as another model than the cache's reference",
    )
    other_sampling: bool = Field(
        default=False,
        description=(
            "let grpo and ppo learn from samples drawn at another temperature than 1, or with "
            "top-p or top-k, although their ratio divides by the reference's own probabilities"
        ),
    )
    nonfinite_limit: int = Field(
        default=3, ge=1, description="NaN or infinite steps in a row that end the run"
    )

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; an undecided `auto` counts as no."""
        return self.gradient_checkpointing is True

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of layers wait on the CPU; an undecided `auto` counts as no."""
        return self.checkpoint_offload is True

    @property
    def eval_caches(self) -> list[tuple[str, str]]:
        """Names and paths of the caches to evaluate on; one alone may have no name."""
        found, is_alone = list[tuple[str, str]](), len(self.eval_cache) == 1
        for name, path in map(named_path, self.eval_cache):
            # The names of metrics have few characters.
            own = re.sub(r"^\.+|[^\w.-]", "_", Path(path).absolute().name, flags=re.ASCII)
            found.append((name or ("" if is_alone else own), path))
        return found

    @property
    def holds_rows_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        return bool(self.eval_fraction or self.eval_cache)


@dataclass(frozen=True, config=STRICT)
class LoraOptions:
    """Training of an adapter instead of the whole policy."""

    enabled: bool = Field(default=False, description="train a LoRA adapter by peft")
    start: Literal["adapter", "merge"] = Field(
        default="adapter",
        description=(
            "of a reference with an adapter: adapter trains that adapter further, on its unchanged "
            "base; merge trains all weights, with the adapter merged into them"
        ),
    )
    rank: int = Field(default=16, ge=1, description="rank of the adapter")
    alpha: float = Field(default=32.0, ge=0, description="scale of the adapter is alpha / rank")
    dropout: float = Field(
        default=0.0, ge=0, le=1, description="dropout of the adapter's input; needs train.dropout"
    )
    targets: list[str] = Field(
        default_factory=list,
        description="layers to adapt, by the end of their names; empty: all linear ones",
    )
    quantize: Literal["none", "nf4"] = Field(
        default="none",
        description="nf4: keep the frozen weights in 4 bits (QLoRA); needs bitsandbytes",
    )
    merge: bool = Field(
        default=False, description="also write the policy with the adapter merged into it"
    )

    def continued(self, adapter: str) -> str:
        """The folder of the reference's adapter if it is trained further; else empty."""
        return adapter if self.enabled and self.start == "adapter" else ""
