"""Every setting, its default, and the sentence that explains it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .data_options import DataOptions, TokenOptions
from .option import STRICT, PathStr
from .round_options import JudgeOptions, RoundsOptions, SampleOptions, SelectOptions, ServerOptions
from .train_options import LoraOptions, TrainOptions


@dataclass(frozen=True, config=STRICT)
class ModelOptions:
    """The frozen reference."""

    path: PathStr = Field(
        default="",
        description=(
            "reference model: a folder (safetensors, config, tokenizer), or OWNER/NAME of the Hub"
        ),
    )
    adapter: PathStr = Field(
        default="", description="PEFT adapter on top of it, in a folder or of the Hub; empty: none"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: the dtype the weights are stored in"
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto",
        description=(
            "auto: FlexAttention on a GPU if it reproduces the model; else sdpa if the model "
            "has it, else eager"
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is one"
    )
    device_map: str = Field(
        default="", description="spread a large model over devices: auto, balanced or sequential"
    )
    allow_unused_weights: bool = Field(
        default=False,
        description="accept a model folder that stores more tensors than its config.json uses",
    )


@dataclass(frozen=True, config=STRICT)
class CacheOptions:
    """The contents and the location of a cache."""

    output: PathStr = Field(default="align-cache", description="folder of the cache")
    kl_pairs: int = Field(
        default=1,
        ge=0,
        description="KL completions, of other prompts, per completion (KTO's KL term); 0: none",
    )
    token_logps: bool = Field(default=False, description="also store the log-prob of every token")
    scored: bool = Field(
        default=True,
        description="run the reference; false: a cache for methods that need no reference",
    )
    shards: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="number of shards; 0: chosen by the data, about 1,000 rows or more each",
    )
    reuse: list[PathStr] = Field(
        default_factory=list, description="other caches whose scores may be reused"
    )
    reuse_known: bool = Field(
        default=True, description="also reuse scores of caches that this user made before"
    )


@dataclass(frozen=True, config=STRICT)
class ScoringOptions:
    """Batches and devices for the reference."""

    tokens_per_batch: int = Field(
        default=16_384, ge=1, description="most tokens, padding included, in one batch"
    )
    executor: Literal["inline", "ray"] = Field(
        default="inline",
        description="where shards are scored: inline in this process, ray in actors of a cluster",
    )
    ray_address: str = Field(
        default="",
        description="address of a Ray cluster; empty: one is started here and ends with the run",
    )
    ray_workers: int = Field(
        default=0, ge=0, description="number of actors; 0: one per GPU, or per machine without GPUs"
    )
    ray_gpus_per_worker: float = Field(
        default=0.0, ge=0, description="GPUs of each actor; 0: one if the model is on cuda"
    )


@dataclass(frozen=True, config=STRICT)
class TrackingOptions:
    """The trackers of runs."""

    mlflow: bool = Field(default=True, description="record runs in MLflow")
    trackers: list[str] = Field(
        default_factory=list,
        description="trackers of runs: any of mlflow, tensorboard, wandb; empty: mlflow",
    )
    uri: str = Field(
        default="", description="tracking server; empty: MLFLOW_TRACKING_URI or sqlite:///mlflow.db"
    )
    experiment: str = Field(default="align", description="experiment name")
    run_name: str = Field(
        default="", description="run name; empty: made of the model, the method and the data"
    )
    upload_model: bool = Field(
        default=False,
        description="also upload the trained model, not only its card; the run waits for it",
    )
    system_metrics: bool = Field(
        default=False,
        description="also log processor, memory, disk and GPU memory with each training step",
    )

    def none(self) -> TrackingOptions:
        """The same options without any tracker."""
        return replace(self, mlflow=False, trackers=[])


@dataclass(frozen=True, config=STRICT)
class RewardOptions:
    """Scoring of completions by a reward model."""

    model: PathStr = Field(
        default="",
        description="folder of the reward model: one made by --method reward, or any other",
    )
    output: PathStr = Field(default="align-rewards", description="folder of the scored data")


@dataclass(frozen=True, config=STRICT)
class Config:
    """The content of an `align.yaml`."""

    model: ModelOptions = Field(default_factory=ModelOptions)
    data: DataOptions = Field(default_factory=DataOptions)
    tokens: TokenOptions = Field(default_factory=TokenOptions)
    cache: CacheOptions = Field(default_factory=CacheOptions)
    scoring: ScoringOptions = Field(default_factory=ScoringOptions)
    tracking: TrackingOptions = Field(default_factory=TrackingOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    lora: LoraOptions = Field(default_factory=LoraOptions)
    rewards: RewardOptions = Field(default_factory=RewardOptions)
    server: ServerOptions = Field(default_factory=ServerOptions)
    sample: SampleOptions = Field(default_factory=SampleOptions)
    judge: JudgeOptions = Field(default_factory=JudgeOptions)
    select: SelectOptions = Field(default_factory=SelectOptions)
    rounds: RoundsOptions = Field(default_factory=RoundsOptions)
    # The allowed keys depend on train.method; the method's options class checks them.
    method: dict[str, Any] = Field(default_factory=dict)
