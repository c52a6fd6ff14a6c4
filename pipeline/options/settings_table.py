"""The settings of each command: its flags, other settings it reads, and those that must match.

A name is a setting such as train.lr, or a section, which means all of its settings.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from ...schemas.config import Config
from ...schemas.option import PATH

_CONFIG: Any = Config
SECTIONS: dict[str, Any] = {
    name: field.annotation for name, field in _CONFIG.__pydantic_fields__.items()
}

# The settings that are flags, by section, with the flag's word if it differs from the name. All
# options of methods are flags.
FLAGS = {
    "model": "path:--model adapter dtype device",
    "data": "map split max_bad_frac",
    "tokens": "max_length max_prompt_length",
    "cache": "output kl_pairs token_logps scored shards reuse",
    "scoring": "tokens_per_batch executor ray_address ray_workers "
    "ray_gpus_per_worker:--ray-worker-gpus",
    "tracking": "mlflow trackers:--track",
    "train": "method cache model output epochs max_steps max_time batch_size tokens_per_batch lr "
    "schedule min_lr warmup weight_decay max_grad_norm seed dtype memory optimizer deepspeed "
    "eval_fraction eval_cache eval_every save_every keep_last resume",
    "lora": "enabled:--lora start:--lora-start rank:--lora-rank alpha:--lora-alpha "
    "targets:--lora-target quantize merge",
    "rewards": "model:--reward-model output",
    "server": "url:--server model:--server-model revision concurrency",
    "sample": "output n:-n temperature top_p top_k max_new_tokens seed",
    "judge": "output by model template function pattern answer against pairs",
    "select": "output rows min_gap max_length_ratio keep_cut",
    "rounds": "output count reference",
}
# Other words of single commands: `align run` has to distinguish two stages.
OWN_WORDS = {
    "run": {
        "model.dtype": "--reference-dtype",
        "cache.output": "--cache",
        "scoring.tokens_per_batch": "--reference-tokens",
        "train.model": "--policy",
    },
    "evaluate": {"train.eval_cache": "--cache"},
}

_COMPUTING = "model.attention model.allow_unused_weights"
_TRACKING = "tracking.mlflow tracking.trackers"
_RECORD = "tracking.uri tracking.experiment tracking.run_name"
_TRAINING = "train lora method model.device tracking"
_EVERYTHING = " ".join(SECTIONS)
# Each command with settings: those with flags, and those that it reads only from a file, the
# environment or --set.
COMMANDS = {
    "precompute-ref": (f"model data tokens cache scoring {_TRACKING}", _RECORD),
    "import-ref": (f"model data tokens cache scoring {_TRACKING}", _RECORD),
    "score": (
        f"rewards data tokens.max_length model.dtype model.device scoring {_TRACKING}",
        f"{_COMPUTING} model.device_map tokens cache.shards cache.reuse cache.reuse_known "
        f"{_RECORD}",
    ),
    "train": (_TRAINING, f"{_COMPUTING} tokens cache.output"),
    "sample": (
        f"model sample server data scoring.tokens_per_batch {_TRACKING}",
        f"tokens {_RECORD}",
    ),
    "judge": (
        "judge rewards.model server model.dtype model.device data.map data.max_bad_frac "
        f"{_TRACKING}",
        f"{_COMPUTING} model.device_map data.wrap tokens scoring.tokens_per_batch {_RECORD}",
    ),
    "select": ("select data.map data.max_bad_frac", "data.wrap"),
    "check": ("model.path data tokens", ""),
    "verify": (
        "server.model",
        "model.device model.device_map tokens.chat_template server",
    ),
    "sweep": (_TRAINING, f"{_COMPUTING} tokens cache.output"),
    "plan": (
        _TRAINING,
        f"{_COMPUTING} model.path model.adapter tokens cache.output cache.kl_pairs",
    ),
    "evaluate": (
        "train.eval_cache train.method train.dtype train.tokens_per_batch method model.device",
        f"{_COMPUTING} tokens train.pairs_from_scores train.min_score_gap train.label_threshold "
        "train.other_sampling train.limit_eval_batches train.batch_size",
    ),
    "run": ("model data tokens cache train lora method scoring tracking", ""),
    "rounds": (f"rounds train.method {_TRACKING}", _EVERYTHING),
    "config": ("", _EVERYTHING),
}
# Exceptions, which a command does not read: the flag or setting to use instead, if there is one.
_POLICY = {
    "model.path": "--model (train.model); another policy than the cache's reference needs "
    "train.other_reference=true",
    "model.dtype": "train.dtype",
}
INSTEAD = {
    "train": _POLICY,
    "sweep": {"train.method": "--method", "train.output": "--output", **_POLICY},
    "run": {"train.cache": "--cache"},
    "import-ref": dict.fromkeys(
        ("cache.token_logps", "cache.scored", "cache.reuse", "cache.reuse_known"), ""
    ),
    "score": {"model.path": "--reward-model"},
    "verify": {"model.path": "--model", "model.adapter": "--adapter", "server.url": "--server"},
    "rounds": {
        "cache.output": "rounds.output",
        "train.cache": "rounds.output",
        "train.model": "model.path",
        "train.output": "rounds.output",
        "train.resume": "",
        "train.other_reference": "rounds.reference",
        "lora.start": "",
        "sample.output": "rounds.output",
        "sample.answers": "rounds.output",
        "judge.output": "rounds.output",
        "judge.answers": "rounds.output",
        "judge.against": "",
        "select.output": "rounds.output",
    },
}

# Names of options in transformers and TRL, with align's settings.
OURS = {
    "model_name_or_path": "model.path",
    "ref_model": "model.path",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "dataset_name": "data.files",
    "eval_dataset": "train.eval_cache",
    "truncation_mode": "tokens.prompt_side",
    "loss_type": "train.method",
    "loss_weights": "train.method",
    "beta": "method.beta",
    "rpo_alpha": "method.sft_weight",
    "cpo_alpha": "method.alpha",
    "simpo_gamma": "method.gamma_ratio",
    "f_divergence_type": "method.f_divergence",
    "use_weighting": "method.wpo",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "num_train_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
    "optim": "train.optimizer",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "bf16": "train.dtype",
    "fsdp": "train.deepspeed",
    "use_peft": "lora.enabled",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "load_in_4bit": "lora.quantize",
    "eval_steps": "train.eval_every",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "metric_for_best_model": "train.best",
    "load_best_model_at_end": "train.write_best",
    "early_stopping_patience": "train.patience",
    "resume_from_checkpoint": "train.resume",
    "output_dir": "train.output",
    "report_to": "tracking.trackers",
}

# The settings that must match for a finished cache, a resumed run, and a round. A run may resume
# with another `length`, which changes its numbers, or with another `end`, which does not. Free
# settings need not match: locations (contents are compared instead), the way of doing the work, and
# the records of it.
_LENGTH = "train.epochs train.max_steps"
_END = "train.best train.write_best train.patience"
_FREE = (
    "tokens.learn tokens.chat_template cache.output cache.scored cache.reuse cache.reuse_known "
    "train.cache train.model train.output train.max_time train.tokens_per_batch train.memory "
    "train.gradient_checkpointing train.checkpoint_offload train.deepspeed train.eval_cache "
    "train.eval_every train.eval_table train.eval_text "
    "train.row_margins train.limit_eval_batches train.log_every train.save_every "
    "train.save_minutes train.keep_last train.resume train.other_sampling train.nonfinite_limit "
    "lora.merge sample.output sample.answers judge.output judge.answers judge.model "
    "judge.template judge.against select.output rounds.output rounds.count rounds.min_win_rate "
    "rounds.max_length_growth rounds.serve rounds.serve_timeout"
)
_MUST_MATCH = {  # with exceptions
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


@cache
def fields() -> Mapping[str, FieldInfo]:
    """Every declared setting by dotted name, without options of methods."""
    found = {}
    for section, options in SECTIONS.items():
        inside = getattr(options, "__pydantic_fields__", {})
        found.update({f"{section}.{name}": field for name, field in inside.items()})
    return found


@cache
def paths() -> frozenset[str]:
    """The settings that are paths."""
    found = set()
    for name, field in fields().items():
        of_items = (getattr(one, "__metadata__", ()) for one in get_args(field.annotation))
        if PATH in field.metadata or any(PATH in one for one in of_items):
            found.add(name)
    return frozenset(found)


@cache
def flags_of(command: str) -> Mapping[str, str]:
    """The flags of a command by the dotted names of their settings, in order."""
    taken, _ = COMMANDS.get(command, ("", ""))
    words = {
        f"{section}.{key}": word or word_of(key)
        for section, flags in FLAGS.items()
        for key, _, word in (flag.partition(":") for flag in flags.split())
    }
    words |= OWN_WORDS.get(command, {})
    return {
        name: words[name]
        for part in taken.split()
        for name in fields()
        if is_among(name, part) and name in words and name not in INSTEAD.get(command, {})
    }


def flag_of(name: str, command: str) -> str:
    """The flag of a setting in a command; empty if there is none."""
    section, _, key = name.partition(".")
    if section == "method":
        return word_of(key) if is_among(name, COMMANDS.get(command, ("",))[0]) else ""
    return flags_of(command).get(name, "")


def as_flags(settings: Mapping[str, Any], command: str, by_set: Collection[str] = ()) -> str:
    """The words that give these settings to a command; settings given by --set need --set again."""
    words = []
    for name, value in settings.items():
        flag = "" if name in by_set else flag_of(name, command)
        text = str(value) if isinstance(value, str | float) else json.dumps(value)
        if flag and isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif flag:
            each = value if isinstance(value, list) else [text]
            if isinstance(value, dict):
                each = [f"{ours}={theirs}" for ours, theirs in value.items()]
            words += [f"{flag} {shlex.quote(str(one))}" for one in each]
        else:
            words.append(f"--set {shlex.quote(f'{name}={text}')}")
    return " ".join(words)


def word_of(key: str) -> str:
    """The flag with the name of a setting or an option."""
    return f"--{key.replace('_', '-')}"


def meant_by(name: str) -> list[str]:
    """The settings for a name of another trainer, or for a name without its section."""
    key = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    own = [setting for setting in fields() if setting.rpartition(".")[2] == key]
    if name in own:
        return []
    if key in OURS:
        return [OURS[key]]
    return own if len(own) == 1 else []


def reads(command: str, name: str) -> bool:
    """Whether a command uses a setting; rounds pass their settings to every other command."""
    return name not in INSTEAD.get(command, {}) and is_among(name, " ".join(COMMANDS[command]))


def must_match(name: str, *outputs: str) -> bool:
    """Whether a setting must match for one of these: a cache, a run, a round."""
    kept = (_MUST_MATCH[output] for output in outputs)
    return any(is_among(name, included) and not is_among(name, free) for included, free in kept)


def settings_to_match(settings: Mapping[str, Any], *outputs: str) -> dict[str, str]:
    """The settings that must match for one of these, as text; mappings ignore order."""
    return {
        name: repr(dict(sorted(value.items())) if isinstance(value, dict) else value)
        for name, value in settings.items()
        if must_match(name, *outputs)
    }


def is_among(name: str, names: str) -> bool:
    """Whether a setting or its section is one of these names."""
    return not {name, name.partition(".")[0]}.isdisjoint(names.split())
