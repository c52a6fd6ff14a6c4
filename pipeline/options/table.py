"""What each command takes of the settings: its flags, what it reads besides, and what binds it.

A name is one of a setting, as train.lr, or of a section, which stands for all of its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from ...schemas.config import Config
from ...schemas.option import PATH

# The settings that are flags, by section.
FLAGS = {
    "model": "path adapter dtype device",
    "data": "map split max_bad_frac",
    "tokens": "max_length max_prompt_length",
    "cache": "output kl_pairs token_logps shards reuse",
    "scoring": "tokens_per_batch executor ray_address ray_workers ray_gpus_per_worker",
    "tracking": "mlflow trackers",
    "train": "method cache model output epochs max_steps max_time batch_size tokens_per_batch lr "
    "schedule min_lr warmup weight_decay max_grad_norm seed dtype memory optimizer deepspeed "
    "eval_fraction eval_cache eval_every save_every keep_last resume",
    "lora": "enabled rank alpha targets quantize merge",
    "rewards": "model output",
    "server": "url model revision concurrency",
    "sample": "output n temperature top_p top_k max_new_tokens seed",
    "judge": "output by model template function pattern answer against pairs",
    "select": "output rows min_gap max_length_ratio keep_cut",
    "rounds": "output count reference",
}
# Their words, where these are not the names; and those that `align run` has to tell apart.
WORDS = {
    "model.path": "--model",
    "scoring.ray_gpus_per_worker": "--ray-worker-gpus",
    "tracking.trackers": "--track",
    "lora.enabled": "--lora",
    "lora.rank": "--lora-rank",
    "lora.alpha": "--lora-alpha",
    "lora.targets": "--lora-target",
    "rewards.model": "--reward-model",
    "server.url": "--server",
    "server.model": "--server-model",
    "sample.n": "-n",
}
WORDS_OF_RUN = {
    "model.dtype": "--reference-dtype",
    "cache.output": "--cache",
    "scoring.tokens_per_batch": "--reference-tokens",
    "train.model": "--policy",
}
# What a command has the flags of; the options of methods are all flags.
TAKES = {
    "precompute-ref": "model data tokens cache scoring tracking",
    "score": "model.dtype model.device data tokens.max_length scoring tracking rewards",
    "train": "model.device tracking train lora method",
    "sample": "model data scoring.tokens_per_batch tracking server sample",
    "judge": "model.dtype model.device data.map data.max_bad_frac tracking rewards.model server "
    "judge",
    "select": "data.map data.max_bad_frac select",
    "check": "model.path data tokens",
    "sweep": "model.device tracking train lora method",
    "plan": "model.device tracking train lora method",
    "rounds": "tracking train.method rounds",
}
# What it reads besides, from a file, the environment or --set.
_COMPUTING = "model.attention model.compile model.device model.allow_unused_weights"
_RECORD = "tracking.uri tracking.experiment tracking.run_name"
_TRAINING = f"{_COMPUTING} tokens cache.output tracking train lora method"
READS = {
    "precompute-ref": f"model data tokens cache scoring {_RECORD}",
    "score": f"{_COMPUTING} model.device_map data tokens cache.shards cache.reuse "
    f"cache.reuse_known scoring {_RECORD} rewards",
    "train": _TRAINING,
    "sample": f"model data tokens {_RECORD} server sample",
    "judge": f"{_COMPUTING} model.device_map data.wrap tokens scoring.tokens_per_batch {_RECORD} "
    "server judge",
    "select": "data.wrap select",
    "check": "data tokens",
    "verify": "model.compile model.device model.device_map",
    "sweep": _TRAINING,
    "plan": f"{_TRAINING} model.path cache.kl_pairs",
}
COMMANDS = (*READS, "run", "rounds", "config")
# What a command sets itself, and the flag or the setting to use instead, if there is one.
SETS = {
    "sweep": {"train.method": "--method", "train.output": "--output"},
    "rounds": {
        "cache.output": "rounds.output",
        "train.cache": "rounds.output",
        "train.model": "model.path",
        "train.output": "rounds.output",
        "train.resume": "",
        "train.other_reference": "rounds.reference",
        "sample.output": "rounds.output",
        "sample.answers": "rounds.output",
        "judge.output": "rounds.output",
        "judge.answers": "rounds.output",
        "judge.against": "",
        "select.output": "rounds.output",
    },
}
# What serves in place of a setting that a command does not read.
_POLICY = (
    "The policy begins as the reference of the cache. To train another model, pass it by --model "
    "DIR (train.model), with --set train.other_reference=true where the reference stays"
)
INSTEAD = {
    ("train", "model.dtype"): "Set train.dtype",
    ("train", "model.path"): _POLICY,
    ("sweep", "model.path"): _POLICY,
    ("score", "model.path"): "Pass --reward-model DIR",
    ("verify", "model.path"): "Pass --model DIR",
    ("run", "train.cache"): "Pass --cache DIR: it trains on the cache that it makes",
}

# What binds a finished cache, a run that is resumed, and a round. With another `length` a run is
# resumed as well, but it is not the run that it would have been without a stop; with another `end`
# it is. What is free binds none of them: where things are (what they hold is compared instead), how
# the work is done, and what is written down of it.
_LENGTH = "train.epochs train.max_steps"
_END = "train.best train.write_best train.patience"
_FREE = (
    "tokens.learn tokens.chat_template cache.output cache.reuse cache.reuse_known train.cache "
    "train.model train.output train.max_time train.tokens_per_batch train.memory "
    "train.gradient_checkpointing train.checkpoint_offload train.deepspeed train.eval_cache "
    "train.eval_every train.eval_table train.eval_text "
    "train.row_margins train.limit_eval_batches train.log_every train.save_every "
    "train.save_minutes train.keep_last train.resume train.other_sampling train.nonfinite_limit "
    "lora.merge sample.output sample.answers judge.output judge.answers judge.model "
    "judge.template judge.against select.output rounds.output rounds.count rounds.min_win_rate "
    "rounds.max_length_growth"
)
_BINDS = {  # and what of that does not
    "cache": ("tokens cache scoring.tokens_per_batch", _FREE),
    "run": ("train lora method", f"{_FREE} {_LENGTH} {_END}"),
    "length": (_LENGTH, ""),
    "end": (_END, ""),
    "round": (
        "model.dtype model.attention tokens cache scoring.tokens_per_batch train lora method "
        "server.model server.revision sample judge select rounds",
        f"{_FREE} train.best train.other_reference",
    ),
}


_CONFIG: Any = Config
SECTIONS: dict[str, Any] = {
    name: field.annotation for name, field in _CONFIG.__pydantic_fields__.items()
}


@cache
def fields() -> Mapping[str, FieldInfo]:
    """Every setting that is declared, by its dotted name; options of methods are not."""
    found = {}
    for section, options in SECTIONS.items():
        inside = getattr(options, "__pydantic_fields__", {})
        found.update({f"{section}.{name}": field for name, field in inside.items()})
    return found


@cache
def paths() -> frozenset[str]:
    """The settings that are paths, which a config file gives from where it is."""
    found = set()
    for name, field in fields().items():
        of_items = (getattr(one, "__metadata__", ()) for one in get_args(field.annotation))
        if PATH in field.metadata or any(PATH in one for one in of_items):
            found.add(name)
    return frozenset(found)


@cache
def flags_of(command: str) -> Mapping[str, str]:
    """The flag of each setting that has one in this command, by its dotted name, in order."""
    if command == "run":  # both stages; the cache of the second is that of the first
        both = {**flags_of("precompute-ref"), **flags_of("train"), **WORDS_OF_RUN}
        return {name: both[name] for name in fields() if name in both and reads("run", name)}
    taken = {}
    for section, keys in FLAGS.items():
        for name in (f"{section}.{key}" for key in keys.split()):
            if is_among(name, TAKES.get(command, "")) and name not in SETS.get(command, ()):
                taken[name] = word_of(name)
    return {name: taken[name] for name in fields() if name in taken}


def word_of(name: str) -> str:
    """The word of a setting's flag in the commands that have it, but for some of `align run`."""
    return WORDS.get(name) or f"--{name.partition('.')[2].replace('_', '-')}"


def flag_of(name: str, command: str) -> str:
    """The flag of a setting in this command; empty if it has none there."""
    if name.startswith("method."):
        stage = "train" if command == "run" else command
        return word_of(name) if is_among(name, TAKES.get(stage, "")) else ""
    return flags_of(command).get(name, "")


def reads(command: str, name: str) -> bool:
    """Whether a command uses a setting; rounds give theirs to every other command."""
    if command in ("config", "rounds"):
        return True
    if command == "run":
        return name != "train.cache" and (reads("precompute-ref", name) or reads("train", name))
    return name in flags_of(command) or is_among(name, READS[command])


def binds(name: str, *keepers: str) -> bool:
    """Whether a setting binds one of the keepers."""
    kept = (_BINDS[keeper] for keeper in keepers)
    return any(is_among(name, binding) and not is_among(name, free) for binding, free in kept)


def bound(settings: Mapping[str, Any], *keepers: str) -> dict[str, str]:
    """What one of the keepers keeps of settings; a mapping says the same in any order."""
    return {
        name: repr(dict(sorted(value.items())) if isinstance(value, dict) else value)
        for name, value in settings.items()
        if binds(name, *keepers)
    }


def is_among(name: str, names: str) -> bool:
    """Whether a setting or its section is one of these names."""
    return not {name, name.partition(".")[0]}.isdisjoint(names.split())
