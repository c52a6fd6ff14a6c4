"""The settings that each command reads, and its typed flags for them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from ..schemas.config import Config
from ..schemas.errors import UsageError

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Config file (default: align.yaml, here or beside the data)."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any setting: SECTION.NAME=VALUE.")]
Part = Annotated[
    str | None, typer.Option("--part", help="I/N: only the I-th of N parts, beside the others.")
]


def with_flags(
    flags: Mapping[str, str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a flag per setting to a command, which gets their values as `flags`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = {_parameter_name(flag): setting for flag, setting in flags.items()}

        @wraps(command)
        def run(**values: Any) -> None:
            given = {setting: _meant(values.pop(name), setting) for name, setting in added.items()}
            command(flags=given, **values)

        parameters = [
            *(_parameter(flag, setting) for flag, setting in flags.items()),
            *(parameter for name, parameter in own.parameters.items() if name != "flags"),
        ]
        parameters.sort(key=lambda one: one.default is not one.empty)
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """`--map prompt=question` as {"prompt": "question"}."""
    columns = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not (ours and equals):
            raise UsageError(f"--map {text}: expected OURS=YOURS, for example prompt=question.")
        columns[ours] = theirs
    return columns


def _meant(value: Any, setting: str) -> Any:
    """The value for the setting; typer gives an empty list for a flag that was not used."""
    if isinstance(value, list):
        return (parse_map(value) if get_origin(_kind(setting)) is dict else value) or None
    return value


def _parameter(flag: str, setting: str) -> inspect.Parameter:
    section, _, name = setting.partition(".")
    options: Any = getattr(Config(), section)
    meaning = next(field for field in dataclasses.fields(options) if field.name == name)
    kind = _kind(setting)
    option = typer.Option(
        _declared(flag, kind),
        min=meaning.metadata["ge"],
        max=meaning.metadata["le"],
        help=_help(meaning.metadata["description"], getattr(options, name)),
    )
    return inspect.Parameter(
        _parameter_name(flag),
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[_as_typed(kind) | None, option],
    )


def _kind(setting: str) -> Any:
    section, _, name = setting.partition(".")
    return get_type_hints(get_type_hints(Config)[section])[name]


def _declared(flag: str, kind: Any) -> str:
    return f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag


def _as_typed(kind: Any) -> Any:
    """The type of the flag's value; a map is a list of KEY=VALUE."""
    return list[str] if get_origin(kind) is dict else kind


def _help(meaning: str, default: Any) -> str:
    silent = default in ("", [], {}) or isinstance(default, bool)
    return meaning if silent else f"{meaning} (default {default})"


def _parameter_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


_RECORDED = ("tracking.mlflow", "tracking.uri", "tracking.experiment", "tracking.run_name")
# Whole sections, or single settings.
READS: dict[str, tuple[str, ...]] = {
    "config": (
        *("model", "data", "tokens", "cache", "scoring", "tracking"),
        *("train", "lora", "rewards", "objects", "method"),
        *("server", "sample", "judge", "select", "rounds"),
    ),
    "precompute-ref": (
        *("model", "data", "tokens", "cache", "scoring", "objects"),
        *_RECORDED,
    ),
    "score": (
        *("model.dtype", "model.attention", "model.device", "model.device_map"),
        *("model.offload_folder",),
        *("model.trust_remote_code", "model.allow_unused_weights"),
        *("data", "tokens", "scoring", "rewards", "objects"),
        *("cache.seed", "cache.rows_per_shard", "cache.tokens_per_shard"),
        *("cache.reuse", "cache.reuse_known"),
        *_RECORDED,
    ),
    # It records no run, as --no-mlflow asks.
    "score --from-labels": (
        *(
            "data.files",
            "data.map",
            "data.carry",
            "data.wrap",
            "rewards",
            "objects",
            "tracking.mlflow",
        ),
    ),
    "train": (
        *("model.attention", "model.device"),
        *("model.trust_remote_code", "model.allow_unused_weights"),
        *("tokens", "cache.output", "tracking", "train", "lora", "objects", "method"),
    ),
    "sample": ("model", "data", "tokens", "scoring", "server", "sample", "objects", *_RECORDED),
    "judge": (
        *("model.dtype", "model.attention", "model.device", "model.device_map"),
        *("model.offload_folder", "model.trust_remote_code", "model.allow_unused_weights"),
        *("tokens", "scoring", "server", "judge", "rewards.model", "objects"),
        *("data.map", "data.max_bad_frac", "data.wrap"),
        *_RECORDED,
    ),
    "select": ("data.map", "data.max_bad_frac", "data.wrap", "select", "objects"),
    "verify": (
        *("model.device", "model.device_map", "model.offload_folder"),
        *("model.trust_remote_code", "objects"),
    ),
    **dict.fromkeys(
        ("export", "gc", "init", "inspect", "methods", "mlflow-sync", "report", "tiny-world"), ()
    ),
}
READS["sweep"] = READS["train"]
READS["plan"] = (*READS["train"], "model.path", "cache.kl_pairs")
READS["rounds"] = READS["config"]
_OTHER_POLICY = (
    "The policy begins as the reference of the cache. To train another model, pass it by --model "
    "DIR (train.model), with --set train.other_reference=true where the reference stays"
)
_SPREAD_POLICY = "A large policy is spread by --deepspeed zero3"
_FROM_THE_CACHE = "The cache records it"
# What serves in its place, where there is something.
INSTEAD = {
    ("train", "model.path"): _OTHER_POLICY,
    ("train", "model.adapter"): _OTHER_POLICY,
    ("train", "model.dtype"): "Set train.dtype",
    ("train", "model.device_map"): _SPREAD_POLICY,
    ("train", "model.offload_folder"): _SPREAD_POLICY,
    ("train", "model.tensor_parallel"): _SPREAD_POLICY,
    ("score", "model.path"): "Pass --reward-model DIR",
    ("score", "model.adapter"): "Merge the adapter into the reward model",
    ("score", "cache.output"): "Pass --output DIR",
    ("verify", "model.path"): "Pass --model DIR",
    ("verify", "model.adapter"): _FROM_THE_CACHE,
    ("verify", "model.dtype"): _FROM_THE_CACHE,
    ("verify", "model.attention"): _FROM_THE_CACHE,
    ("verify", "model.allow_unused_weights"): _FROM_THE_CACHE,
    ("verify", "model.tensor_parallel"): _FROM_THE_CACHE,
}


def reads(command: str, name: str) -> bool:
    """Whether a command uses a setting."""
    return not {name, name.partition(".")[0]}.isdisjoint(READS[command])


def require_used(command: str, name: str, origin: str) -> None:
    """Refuses a flag or --set that this command would ignore."""
    if reads(command, name):
        return
    others = [f"`align {other}`" for other in READS if other != "config" and reads(other, name)]
    alike = "train" if command == "sweep" else command.partition(" ")[0]
    way = INSTEAD.get((alike, name), f"It is a setting of {', '.join(others)}")
    if origin == "flag":  # only `score` has flags that it does not use in each of its ways
        origin = next((flag for flag, setting in SCORE_FLAGS.items() if setting == name), origin)
    raise UsageError(f"{origin}: {name} is not used by `align {command}`. {way}.")


EXECUTOR_FLAGS = {
    "--executor": "scoring.executor",
    "--ray-address": "scoring.ray_address",
    "--ray-workers": "scoring.ray_workers",
    "--ray-gpus-per-worker": "scoring.ray_gpus_per_worker",
}
PRECOMPUTE_FLAGS = {
    "--model": "model.path",
    "--adapter": "model.adapter",
    "--output": "cache.output",
    "--kl-pairs": "cache.kl_pairs",
    "--token-logps": "cache.token_logps",
    "--max-length": "tokens.max_length",
    "--max-prompt-length": "tokens.max_prompt_length",
    "--tokens-per-batch": "scoring.tokens_per_batch",
    "--rows-per-shard": "cache.rows_per_shard",
    "--dtype": "model.dtype",
    "--device": "model.device",
    "--seed": "cache.seed",
    "--map": "data.map",
    "--max-bad-frac": "data.max_bad_frac",
    "--reuse": "cache.reuse",
    **EXECUTOR_FLAGS,
    "--mlflow": "tracking.mlflow",
}
SCORE_FLAGS = {
    "--reward-model": "rewards.model",
    "--output": "rewards.output",
    "--max-length": "tokens.max_length",
    "--tokens-per-batch": "scoring.tokens_per_batch",
    "--dtype": "model.dtype",
    "--device": "model.device",
    "--map": "data.map",
    "--max-bad-frac": "data.max_bad_frac",
    **EXECUTOR_FLAGS,
    "--mlflow": "tracking.mlflow",
}
SAMPLE_FLAGS = {
    "--model": "model.path",
    "--adapter": "model.adapter",
    "--server": "server.url",
    "--server-model": "server.model",
    "--revision": "server.revision",
    "--output": "sample.output",
    "-n": "sample.n",
    "--temperature": "sample.temperature",
    "--top-p": "sample.top_p",
    "--top-k": "sample.top_k",
    "--max-new-tokens": "sample.max_new_tokens",
    "--seed": "sample.seed",
    "--concurrency": "server.concurrency",
    "--tokens-per-batch": "scoring.tokens_per_batch",
    "--dtype": "model.dtype",
    "--device": "model.device",
    "--map": "data.map",
    "--max-bad-frac": "data.max_bad_frac",
    **EXECUTOR_FLAGS,
    "--mlflow": "tracking.mlflow",
}
JUDGE_FLAGS = {
    "--by": "judge.by",
    "--reward-model": "rewards.model",
    "--model": "judge.model",
    "--server": "server.url",
    "--server-model": "server.model",
    "--revision": "server.revision",
    "--template": "judge.template",
    "--function": "judge.function",
    "--pattern": "judge.pattern",
    "--answer": "judge.answer",
    "--against": "judge.against",
    "--pairs": "judge.pairs",
    "--output": "judge.output",
    "--concurrency": "server.concurrency",
    "--dtype": "model.dtype",
    "--device": "model.device",
    "--map": "data.map",
    "--max-bad-frac": "data.max_bad_frac",
    "--mlflow": "tracking.mlflow",
}
SELECT_FLAGS = {
    "--rows": "select.rows",
    "--min-gap": "select.min_gap",
    "--max-length-ratio": "select.max_length_ratio",
    "--keep-cut": "select.keep_cut",
    "--output": "select.output",
    "--map": "data.map",
    "--max-bad-frac": "data.max_bad_frac",
}
ROUNDS_FLAGS = {
    "--output": "rounds.output",
    "--count": "rounds.count",
    "--reference": "rounds.reference",
    "--method": "train.method",
    "--mlflow": "tracking.mlflow",
}
TRAIN_FLAGS = {
    "--method": "train.method",
    "--cache": "train.cache",
    "--model": "train.model",
    "--output": "train.output",
    "--epochs": "train.epochs",
    "--max-steps": "train.max_steps",
    "--max-time": "train.max_time",
    "--batch-size": "train.batch_size",
    "--tokens-per-batch": "train.tokens_per_batch",
    "--lr": "train.lr",
    "--schedule": "train.schedule",
    "--warmup": "train.warmup",
    "--max-grad-norm": "train.max_grad_norm",
    "--seed": "train.seed",
    "--dtype": "train.dtype",
    "--device": "model.device",
    "--deepspeed": "train.deepspeed",
    "--lora": "lora.enabled",
    "--merge": "lora.merge",
    "--eval-fraction": "train.eval_fraction",
    "--eval-every": "train.eval_every",
    "--save-every": "train.save_every",
    "--keep-last": "train.keep_last",
    "--resume": "train.resume",
    "--mlflow": "tracking.mlflow",
}
