"""Every setting, its default, and the sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from .data_options import DataOptions, TokenOptions
from .option import IN_TASKS, SCORERS, TRAINING, option, section
from .round_options import (
    JudgeOptions,
    RoundsOptions,
    SampleOptions,
    SelectOptions,
    ServerOptions,
)
from .train_options import LoraOptions, TrainOptions

_OTHER_POLICY = (
    "The policy begins as the reference of the cache. To train another model, pass it by --model "
    "DIR (train.model), with --set train.other_reference=true where the reference stays"
)
_SPREAD_POLICY = "A large policy is spread by --deepspeed zero3"
_FROM_THE_CACHE = "The cache records it"


@dataclass(frozen=True)
class ModelOptions:
    """The frozen reference."""

    path: str = option(
        "",
        "folder of the reference model (safetensors, config, tokenizer)",
        flag="--model",
        on=("precompute-ref", "sample", "check"),
        read_by=("plan",),
        is_path=True,
        instead={
            "train": _OTHER_POLICY,
            "score": "Pass --reward-model DIR",
            "verify": "Pass --model DIR",
        },
    )
    adapter: str = option(
        "",
        "folder of a PEFT adapter on top of it; empty for none",
        on=("precompute-ref", "sample"),
        read_by=("plan",),
        is_path=True,
        instead={
            "train": _OTHER_POLICY,
            "score": "Merge the adapter into the reward model",
            "verify": _FROM_THE_CACHE,
        },
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "auto: the dtype the weights are stored in",
        run_flag="--reference-dtype",
        on=SCORERS,
        read_by=("plan",),
        binds=("round",),
        instead={"train": "Set train.dtype", "verify": _FROM_THE_CACHE},
    )
    attention: Literal["auto", "sdpa", "eager"] = option(
        "auto",
        "auto: FlexAttention on a GPU where it is true to the model; else sdpa where the model has "
        "it, else eager",
        read_by=(*SCORERS, *TRAINING),
        binds=("round",),
        instead={"verify": _FROM_THE_CACHE},
    )
    compile: bool = option(
        False,
        "compile the decoder layers by torch.compile",
        read_by=(*SCORERS, *TRAINING, "verify"),
        binds=(),
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto",
        "auto: cuda where there is one",
        on=(*SCORERS, *TRAINING),
        read_by=("verify",),
    )
    device_map: str = option(
        "",
        "spread a large model over devices: auto, balanced or sequential",
        read_by=("score", "judge", "verify"),
        instead={"train": _SPREAD_POLICY},
    )
    allow_unused_weights: bool = option(
        False,
        "take a model folder that stores more tensors than its config.json has use for",
        read_by=(*SCORERS, *TRAINING),
        instead={"verify": _FROM_THE_CACHE},
    )


@dataclass(frozen=True)
class CacheOptions:
    """What the shards hold and where they are."""

    output: str = option(
        "align-cache",
        "folder of the cache",
        run_flag="--cache",
        on=("precompute-ref",),
        read_by=TRAINING,
        is_path=True,
        binds=(),
        instead={"score": "Pass --output DIR", "rounds": "rounds.output"},
    )
    kl_pairs: int = option(
        1,
        "mismatched completions per completion (KTO's KL term); 0: none",
        ge=0,
        on=("precompute-ref",),
        read_by=("plan",),
    )
    token_logps: bool = option(
        False, "also store the log-prob of every token", on=("precompute-ref",)
    )
    shards: int = option(
        0,
        "how many shards; 0: as many as the data ask for, of some 1,000 rows or more",
        ge=0,
        le=4096,
        on=("precompute-ref",),
        read_by=("score", "plan"),
    )
    reuse: list[str] = option(
        [],
        "further caches whose scores may be reused",
        on=("precompute-ref",),
        read_by=("score",),
        is_path=True,
        binds=(),
    )
    reuse_known: bool = option(
        True, "also reuse from the caches this user made before", read_by=("score",), binds=()
    )


@dataclass(frozen=True)
class ScoringOptions:
    """How the reference is run."""

    tokens_per_batch: int = option(
        16_384,
        "most tokens, padding included, in one batch",
        ge=1,
        run_flag="--reference-tokens",
        on=IN_TASKS,
        read_by=("judge", "plan"),
        binds=("cache", "round"),
    )
    executor: Literal["inline", "ray"] = option(
        "inline",
        "where units are scored: inline in this process, ray in actors of a cluster",
        on=("precompute-ref", "score"),
    )
    ray_address: str = option(
        "",
        "a running Ray cluster; empty: one on this machine, which ends with the run",
        on=("precompute-ref", "score"),
    )
    ray_workers: int = option(
        0,
        "actors; 0: one per GPU, or per machine without GPUs",
        ge=0,
        on=("precompute-ref", "score"),
    )
    ray_gpus_per_worker: float = option(
        0.0,
        "GPUs of each actor; 0: one where the model is on cuda",
        ge=0,
        flag="--ray-worker-gpus",
        on=("precompute-ref", "score"),
    )


@dataclass(frozen=True)
class TrackingOptions:
    """Where runs are recorded."""

    mlflow: bool = option(
        True,
        "record runs in MLflow",
        on=(*SCORERS, *TRAINING, "rounds"),
    )
    trackers: list[str] = option(
        [],
        "where runs are recorded: any of mlflow, tensorboard, wandb; empty: mlflow",
        flag="--track",
        on=(*SCORERS, *TRAINING, "rounds"),
    )
    uri: str = option(
        "", "tracking server; empty: MLFLOW_TRACKING_URI or sqlite:///mlflow.db", read_by=SCORERS
    )
    experiment: str = option("align", "experiment name", read_by=SCORERS)
    run_name: str = option(
        "", "run name; empty: made of the model, the method and the data", read_by=SCORERS
    )
    upload_model: bool = option(
        False, "also upload the trained model, not only its card; the run waits until it is there"
    )
    system_metrics: bool = option(
        False, "with each logged step of a training also processor, memory, disk and GPU memory"
    )

    def none(self) -> TrackingOptions:
        """The same options, of a run that is not recorded."""
        return replace(self, mlflow=False, trackers=[])


@dataclass(frozen=True)
class RewardOptions:
    """Scores for completions, by a reward model."""

    model: str = option(
        "",
        "folder of the reward model: one made by --method reward, or any other",
        flag="--reward-model",
        on=("score", "judge"),
        is_path=True,
    )
    output: str = option("align-rewards", "folder of the scored data", on=("score",), is_path=True)


@dataclass(frozen=True)
class Config:
    """One `align.yaml`."""

    model: ModelOptions = section(ModelOptions, read_by=("precompute-ref", "sample"))
    data: DataOptions = section(DataOptions, read_by=("check", *IN_TASKS))
    tokens: TokenOptions = section(
        TokenOptions, read_by=("check", *SCORERS, *TRAINING), binds=("cache", "round")
    )
    cache: CacheOptions = section(
        CacheOptions, read_by=("precompute-ref",), binds=("cache", "round")
    )
    scoring: ScoringOptions = section(ScoringOptions, read_by=("precompute-ref", "score"))
    tracking: TrackingOptions = section(TrackingOptions, read_by=TRAINING)
    train: TrainOptions = section(TrainOptions, read_by=TRAINING, binds=("run", "round"))
    lora: LoraOptions = section(LoraOptions, read_by=TRAINING, binds=("run", "round"))
    rewards: RewardOptions = section(RewardOptions, read_by=("score",))
    server: ServerOptions = section(ServerOptions, read_by=("sample", "judge"))
    sample: SampleOptions = section(SampleOptions, read_by=("sample",), binds=("round",))
    judge: JudgeOptions = section(JudgeOptions, read_by=("judge",), binds=("round",))
    select: SelectOptions = section(SelectOptions, read_by=("select",), binds=("round",))
    rounds: RoundsOptions = section(RoundsOptions, read_by=("rounds",), binds=("round",))
    # What may stand here depends on train.method: its own options class checks it.
    method: dict[str, Any] = section(dict, on=TRAINING, binds=("run", "round"))
