"""The settings of training: of the policy, and of an adapter in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .option import TRAINERS, TRAINING, option


@dataclass(frozen=True)
class TrainOptions:
    """The policy and how it learns."""

    method: str = option(
        "",
        "kto, dpo or orpo; `align methods` lists them",
        on=(*TRAINERS, "rounds"),
        instead={"sweep": "--method"},
    )
    cache: str = option(
        "",
        "folder of the cache; empty: the one of cache.output",
        on=TRAINING,
        is_path=True,
        binds=(),  # its root is compared instead
        instead={
            "rounds": "rounds.output",
            "run": "Pass --cache DIR: it trains on the cache that it makes",
        },
    )
    model: str = option(
        "",
        "folder of the policy; empty: the reference the cache was made with",
        run_flag="--policy",
        on=TRAINING,
        is_path=True,
        binds=(),  # the digests of its files are compared instead
        instead={"rounds": "model.path"},
    )
    output: str = option(
        "align-run",
        "folder of the run",
        on=TRAINERS,
        is_path=True,
        binds=(),
        instead={"rounds": "rounds.output", "sweep": "--output"},
    )
    epochs: float = option(
        1.0,
        "times every row is seen; 0.5: half of the rows, in whole steps",
        gt=0,
        le=1e12,
        on=TRAINING,
        binds=("length", "round"),
    )
    max_steps: int = option(
        0,
        "stop after so many optimizer steps; 0: no limit",
        ge=0,
        on=TRAINING,
        binds=("length", "round"),
    )
    max_time: str = option(
        "",
        "save and stop after this long, for example 3h30m; empty: no limit",
        on=TRAINING,
        binds=(),
    )
    batch_size: int = option(
        64, "global batch: rows per optimizer step over all ranks", ge=1, on=TRAINING
    )
    tokens_per_batch: int = option(
        0,
        "micro-batch of a rank, in tokens; 0: 16,384 on a GPU, 2,048 on a CPU, fewer where "
        "train.memory asks for it",
        ge=0,
        on=TRAINING,
        binds=(),
    )
    lr: float = option(1e-6, "highest learning rate", ge=0, on=TRAINING)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "cosine", "how it falls afterwards", on=TRAINING
    )
    min_lr: float = option(0.0, "where it ends, as a share of lr", ge=0, le=1, on=TRAINING)
    warmup: float = option(
        0.1, "steps it takes to rise; below 1: a share of all steps", ge=0, on=TRAINING
    )
    weight_decay: float = option(0.0, "decoupled; not of biases and norms", ge=0, on=TRAINING)
    beta1: float = option(0.9, "of AdamW", ge=0, lt=1)
    beta2: float = option(0.999, "of AdamW", ge=0, lt=1)
    epsilon: float = option(1e-8, "of AdamW", ge=0)
    max_grad_norm: float = option(
        1.0, "longer gradients are shortened to this; 0: never", ge=0, on=TRAINING
    )
    seed: int = option(0, "orders the rows and draws dropout", on=TRAINING)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto: the dtype the policy's weights are stored in", on=TRAINING
    )
    dropout: bool = option(False, "keep the dropout that the model's config asks for")
    memory: str | int = option(
        "",
        "what a GPU, or the process on a CPU, may use, for example 24g, 512m or bytes: every "
        "setting that is auto is chosen to fit; empty: all of the GPU, and no limit on a CPU",
        on=TRAINING,
        binds=(),
    )
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto",
        "true: less memory for a third more computing; auto: where train.memory asks for it",
        binds=(),
    )
    checkpoint_offload: bool | Literal["auto"] = option(
        "auto",
        "with gradient_checkpointing: what enters a layer waits in the memory of the CPU",
        binds=(),
    )
    optimizer: Literal["adamw", "adamw8bit"] = option(
        "adamw",
        "adamw8bit needs bitsandbytes; a DeepSpeed JSON file may name another",
        on=TRAINING,
    )
    optimizer_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "of master weights and optimizer states, where the policy is in bfloat16"
    )
    router_loss: float = option(
        0.0, "weight of the loss that spreads tokens over the experts of a mixture; 0: none", ge=0
    )
    deepspeed: str = option(
        "auto",
        "zero0, zero1, zero2, zero3, zero2-offload, zero3-offload, or a DeepSpeed JSON file; auto: "
        "zero1, and zero0 for a single float32 process, or more where train.memory asks for it",
        on=TRAINING,
        is_path=True,
        binds=(),  # what it makes the engine compute is compared instead
    )
    pairs_from_scores: Literal["best_worst", "all"] = option(
        "best_worst", "pairs out of scored rows: the best and the worst of each, or all pairs"
    )
    min_score_gap: float = option(0.0, "scores of such a pair are further apart than this", ge=0)
    label_threshold: float | str = option(
        "mean",
        "scored completions are desirable above this, undesirable below it, neither at it: mean "
        "or median of their row, or a number",
    )
    desirable_share: float = option(
        1.0,
        "share of prompts whose desirable completions a method of labels learns from",
        ge=0,
        le=1,
    )
    undesirable_share: float = option(
        1.0,
        "share of prompts whose undesirable ones it does; shares that add up to 1 share no prompt",
        ge=0,
        le=1,
    )
    file_weights: dict[str, float] = option(
        {},
        "how often an epoch draws the rows of a data file, for example {prefs.jsonl: 2, old: 0.5}; "
        "0: not at all; files that are not named: once",
    )
    eval_fraction: float = option(
        0.0, "share of prompts held out, chosen by their hash", ge=0, le=1, on=TRAINING
    )
    eval_cache: str = option(
        "",
        "another cache to evaluate on instead",
        on=TRAINING,
        is_path=True,
        binds=(),  # its root is compared instead
    )
    eval_every: int = option(
        0, "steps between evaluations; 0: only before and after", ge=0, on=TRAINING, binds=()
    )
    eval_table: int = option(
        200,
        "held-out rows whose completions each evaluation writes down one by one, in evaluations/; "
        "0: none",
        ge=0,
        binds=(),
    )
    eval_text: bool = option(
        False, "with the text of prompts and completions; MLflow gets it too", binds=()
    )
    answers: int = option(
        0,
        "held-out prompts that the policy answers as it began and as it was trained, side by side "
        "in the report; both models are loaded for it once the training has ended; 0: none",
        ge=0,
        le=1000,
        on=TRAINING,
        binds=(),
    )
    answer_tokens: int = option(128, "most tokens of such an answer", ge=1, binds=())
    row_margins: bool = option(
        False,
        "write down the margin of each training row at each visit, in rows.parquet: which rows are "
        "never learned, and which are forgotten",
        binds=(),
    )
    limit_eval_batches: int = option(0, "evaluation batches at most; 0: all", ge=0, binds=())
    log_every: int = option(1, "steps that one line of metrics covers", ge=1, binds=())
    save_every: int = option(
        0, "steps between checkpoints; 0: by time, and when it ends", ge=0, on=TRAINING, binds=()
    )
    save_minutes: float = option(
        30.0, "minutes after which another one is saved, at any step; 0: never", ge=0, binds=()
    )
    keep_last: int = option(2, "newest checkpoints to keep", ge=1, on=TRAINING, binds=())
    best: str = option(
        "",
        "also keep the checkpoint with the best value, e.g. eval/loss: the lowest of loss, nll, "
        "kl, rejected, grad_norm and errors, else the highest; -NAME lowest, +NAME highest",
        binds=("end",),
    )
    write_best: bool = option(
        False,
        "write the model of the best checkpoint (train.best) instead of that of the last step",
        binds=("end", "round"),
    )
    patience: int = option(
        0,
        "end the run after so many evaluations in a row that were not better than the best one "
        "before them, by train.best; 0: never",
        ge=0,
        binds=("end", "round"),
    )
    resume: Literal["never", "auto"] = option(
        "never",
        "auto: continue from the newest checkpoint",
        on=TRAINING,
        binds=(),
        instead={"rounds": ""},
    )
    other_reference: bool = option(
        False,
        "let the policy begin as another model than the reference of the cache",
        binds=("run",),
        instead={"rounds": "rounds.reference"},
    )
    other_sampling: bool = option(
        False,
        "let grpo and ppo learn from samples that were drawn at another temperature than 1, or "
        "with top-p or top-k: their ratio divides by the reference's own probabilities",
        binds=(),
    )
    nonfinite_limit: int = option(
        3, "NaN or infinite steps in a row before it stops", ge=1, binds=()
    )

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; an `auto` that nothing has decided is no."""
        return self.gradient_checkpointing is True

    @property
    def offloads_inputs(self) -> bool:
        """Whether what enters a layer waits on the CPU; an `auto` that nothing decided is no."""
        return self.checkpoint_offload is True

    @property
    def holds_rows_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.eval_fraction or self.eval_cache)


@dataclass(frozen=True)
class LoraOptions:
    """Training an adapter instead of the whole policy."""

    enabled: bool = option(False, "train a LoRA adapter by peft", flag="--lora", on=TRAINING)
    rank: int = option(16, "inner dimension of --lora", ge=1, flag="--lora-rank", on=TRAINING)
    alpha: float = option(
        32.0, "scale of --lora, divided by its rank", ge=0, flag="--lora-alpha", on=TRAINING
    )
    dropout: float = option(0.0, "of the adapter's input; needs train.dropout", ge=0, le=1)
    targets: list[str] = option(
        [],
        "layers to adapt, by the end of their names; empty: all linear",
        flag="--lora-target",
        on=TRAINING,
    )
    quantize: Literal["none", "nf4"] = option(
        "none", "nf4: keep the frozen weights in 4 bits (QLoRA); needs bitsandbytes", on=TRAINING
    )
    merge: bool = option(
        False, "also write the policy with the adapter merged into it", on=TRAINING, binds=()
    )
