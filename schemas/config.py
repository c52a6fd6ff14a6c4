"""Every setting, its default, and the sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .option import option
from .round_options import (
    JudgeOptions,
    RoundsOptions,
    SampleOptions,
    SelectOptions,
    ServerOptions,
)


@dataclass(frozen=True)
class ModelOptions:
    """The frozen reference."""

    path: str = option("", "folder of the reference model (safetensors, config, tokenizer)")
    adapter: str = option("", "folder of a PEFT adapter on top of it; empty for none")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto: the dtype the weights are stored in"
    )
    attention: Literal["auto", "sdpa", "eager"] = option(
        "auto",
        "auto: FlexAttention on a GPU where it is true to the model; else sdpa where the model has "
        "it, else eager",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda where there is one")
    device_map: str = option(
        "",
        "spread a large model over devices: auto, balanced, sequential, or a JSON object of "
        'modules and devices, such as {"": 0}',
    )
    offload_folder: str = option(
        "", "folder for the weights that device_map puts on disk; empty: they may not"
    )
    tensor_parallel: int = option(
        1, "ranks of torchrun that hold a large reference together, each a part of a layer", ge=1
    )
    trust_remote_code: bool = option(False, "run Python code found in the model folder")
    allow_unused_weights: bool = option(
        False, "take a model folder that stores more tensors than its config.json has use for"
    )


@dataclass(frozen=True)
class DataOptions:
    """The preference data."""

    files: list[str] = option([], "Parquet, JSONL, JSON, CSV, Arrow files or folders of them")
    map: dict[str, str] = option(
        {}, "our column: yours, for example prompt: question; prompt: '' leaves yours out"
    )
    carry: list[str] = option([], "extra numeric columns to keep in the shards")
    wrap: Literal["auto", "chat", "none"] = option(
        "auto",
        "chat: plain text becomes the messages of a user and an assistant, for the chat template; "
        "auto and none leave it as it is, and auto says so where the model has a template",
    )
    max_bad_frac: float = option(
        0.001, "stop when more than this share of rows is unusable", ge=0, le=1
    )
    workers: int = option(
        0, "tokenizing processes; 0: one per usable core when the data is large", ge=0
    )


@dataclass(frozen=True)
class TokenOptions:
    """From text to token ids."""

    max_length: int = option(
        2048, "most tokens in prompt + completion; completions lose their end", ge=2
    )
    max_prompt_length: int = option(
        0, "most tokens in a prompt; 0: only max_length limits it", ge=0
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
    boundary: Literal["shift", "strict"] = option(
        "shift",
        "a token spanning prompt and completion: shift counts it to the completion, "
        "strict quarantines the row",
    )
    date: str = option("", "today (YYYY-MM-DD) for chat templates that ask what day it is")
    chat_template: str = option("", "file with a chat template to use instead of the tokenizer's")


@dataclass(frozen=True)
class CacheOptions:
    """What the shards hold and where they are."""

    output: str = option("align-cache", "folder of the cache")
    kl_pairs: int = option(
        1, "mismatched completions per completion (KTO's KL term); 0: none", ge=0
    )
    token_logps: bool = option(False, "also store the log-prob of every token")
    seed: int = option(0, "orders the rows and so chooses the mismatched completions")
    rows_per_shard: int = option(4096, "most rows in one shard", ge=1)
    tokens_per_shard: int = option(16_777_216, "most tokens in one shard", ge=1)
    reuse: list[str] = option([], "further caches whose scores may be reused")
    reuse_known: bool = option(True, "also reuse from the caches this user made before")


@dataclass(frozen=True)
class ScoringOptions:
    """How the reference is run."""

    tokens_per_batch: int = option(16_384, "most tokens, padding included, in one batch", ge=1)
    executor: Literal["inline", "ray"] = option(
        "inline", "where units are scored: inline in this process, ray in actors of a cluster"
    )
    ray_address: str = option(
        "", "a running Ray cluster; empty: one on this machine, which ends with the run"
    )
    ray_workers: str = option(
        "", "actors, as MIN:MAX or one number; empty: one per GPU, or per machine without GPUs"
    )
    ray_gpus_per_worker: float = option(
        0.0, "GPUs of each actor; 0: one where the model is on cuda", ge=0
    )


@dataclass(frozen=True)
class TrackingOptions:
    """Where runs are recorded."""

    mlflow: bool = option(True, "record runs in MLflow")
    uri: str = option("", "tracking server; empty: MLFLOW_TRACKING_URI or sqlite:///mlflow.db")
    experiment: str = option("align", "experiment name")
    run_name: str = option("", "run name; empty: chosen by MLflow")
    upload_model: bool = option(
        False, "also upload the trained model, not only its card; the run waits until it is there"
    )
    system_metrics: bool = option(
        False, "with each logged step of a training also processor, memory, disk and GPU memory"
    )


@dataclass(frozen=True)
class TrainOptions:
    """The policy and how it learns."""

    method: str = option("", "kto, dpo or orpo; `align methods` lists them")
    cache: str = option("", "folder of the cache; empty: the one of cache.output")
    model: str = option("", "folder of the policy; empty: the reference the cache was made with")
    output: str = option("align-run", "folder of the run")
    epochs: int = option(1, "times every row is seen", ge=1)
    max_steps: int = option(0, "stop after so many optimizer steps; 0: no limit", ge=0)
    max_time: str = option("", "save and stop after this long, for example 3h30m; empty: no limit")
    batch_size: int = option(64, "global batch: rows per optimizer step over all ranks", ge=1)
    tokens_per_batch: int = option(
        0, "micro-batch of a rank, in tokens; 0: 16,384 on a GPU, 2,048 on a CPU", ge=0
    )
    lr: float = option(1e-6, "highest learning rate", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = option("cosine", "how it falls afterwards")
    min_lr: float = option(0.0, "where it ends, as a share of lr", ge=0, le=1)
    warmup: float = option(0.1, "steps it takes to rise; below 1: a share of all steps", ge=0)
    weight_decay: float = option(0.0, "decoupled; not of biases and norms", ge=0)
    beta1: float = option(0.9, "of adamw, adamw8bit, lion and muon", ge=0)
    beta2: float = option(0.999, "of adamw, adamw8bit, lion and muon", ge=0)
    epsilon: float = option(1e-8, "of adamw, adamw8bit and muon", ge=0)
    max_grad_norm: float = option(1.0, "longer gradients are shortened to this; 0: never", ge=0)
    seed: int = option(0, "orders the rows and draws dropout")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto: the dtype the policy's weights are stored in"
    )
    dropout: bool = option(False, "keep the dropout that the model's config asks for")
    gradient_checkpointing: bool = option(False, "less memory for a third more computing")
    checkpoint_offload: bool = option(
        False, "with gradient_checkpointing: what enters a layer waits in the memory of the CPU"
    )
    optimizer: Literal["adamw", "lion", "adafactor", "muon", "adamw8bit"] = option(
        "adamw", "muon is for matrices, AdamW for the rest; adamw8bit needs bitsandbytes"
    )
    optimizer_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "of master weights and optimizer states, where the policy is in bfloat16"
    )
    sequence_parallel: int = option(
        1, "ranks that share every sequence, each a part of its tokens: for long sequences", ge=1
    )
    router_loss: float = option(
        0.0, "weight of the loss that spreads tokens over the experts of a mixture; 0: none", ge=0
    )
    deepspeed: str = option(
        "auto",
        "zero0, zero1, zero2, zero3, zero2-offload, zero3-offload, or a DeepSpeed JSON file; auto: "
        "zero1, and zero0 for a single float32 process",
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
    eval_fraction: float = option(
        0.0, "share of prompts held out, chosen by their hash", ge=0, le=1
    )
    eval_cache: str = option("", "another cache to evaluate on instead")
    eval_every: int = option(0, "steps between evaluations; 0: only before and after", ge=0)
    eval_table: int = option(
        200,
        "held-out rows whose completions each evaluation writes down one by one, in evaluations/; "
        "0: none",
        ge=0,
    )
    eval_text: bool = option(False, "with the text of prompts and completions; MLflow gets it too")
    limit_train_batches: int = option(0, "optimizer steps per epoch at most; 0: all", ge=0)
    limit_eval_batches: int = option(0, "evaluation batches at most; 0: all", ge=0)
    log_every: int = option(1, "steps that one line of metrics covers", ge=1)
    save_every: int = option(0, "steps between checkpoints; 0: by time, and when it ends", ge=0)
    save_minutes: float = option(
        30.0, "minutes after which another one is saved, at any step; 0: never", ge=0
    )
    keep_last: int = option(2, "newest checkpoints to keep", ge=1)
    best: str = option(
        "",
        "also keep the checkpoint with the best value, e.g. eval/loss: the lowest of loss, nll, "
        "kl, rejected, grad_norm and errors, else the highest; -NAME lowest, +NAME highest",
    )
    resume: Literal["never", "auto"] = option("never", "auto: continue from the newest checkpoint")
    other_reference: bool = option(
        False, "let the policy begin as another model than the reference of the cache"
    )
    other_sampling: bool = option(
        False,
        "let grpo and ppo learn from samples that were drawn at another temperature than 1, or "
        "with top-p or top-k: their ratio divides by the reference's own probabilities",
    )
    nonfinite_limit: int = option(3, "NaN or infinite steps in a row before it stops", ge=1)

    @property
    def holds_rows_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.eval_fraction or self.eval_cache)


@dataclass(frozen=True)
class LoraOptions:
    """Training an adapter instead of the whole policy."""

    enabled: bool = option(False, "train a LoRA adapter by peft")
    rank: int = option(16, "inner dimension", ge=1)
    alpha: float = option(32.0, "scale, divided by rank", ge=0)
    dropout: float = option(0.0, "of the adapter's input; needs train.dropout", ge=0)
    targets: list[str] = option([], "layers to adapt, by the end of their names; empty: all linear")
    quantize: Literal["none", "nf4"] = option(
        "none", "nf4: keep the frozen weights in 4 bits (QLoRA); needs bitsandbytes"
    )
    merge: bool = option(False, "also write the policy with the adapter merged into it")


@dataclass(frozen=True)
class RewardOptions:
    """Scores for completions, by a reward model."""

    model: str = option("", "folder of the reward model: one made by --method reward, or any other")
    output: str = option("align-rewards", "folder of the scored data")


@dataclass(frozen=True)
class ObjectOptions:
    """Local copies of what is in an object store (s3://, gs://, az://)."""

    folder: str = option(
        "", "folder of the copies and of unfinished work; empty: ~/.cache/align/objects"
    )
    local_gib: float = option(
        64.0, "most GiB of copies; those used longest ago are removed for others", gt=0
    )


@dataclass(frozen=True)
class Config:
    """One `align.yaml`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    tokens: TokenOptions = field(default_factory=TokenOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    rewards: RewardOptions = field(default_factory=RewardOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    sample: SampleOptions = field(default_factory=SampleOptions)
    judge: JudgeOptions = field(default_factory=JudgeOptions)
    select: SelectOptions = field(default_factory=SelectOptions)
    rounds: RoundsOptions = field(default_factory=RoundsOptions)
    objects: ObjectOptions = field(default_factory=ObjectOptions)
    # What may stand here depends on train.method: its own options class checks it.
    method: dict[str, Any] = field(default_factory=dict)
