"""Changes of settings that take less memory: declared once, in the order they are tried.

A new one is an entry of REMEDIES.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from ...schemas.config import Config
from ...stages.engine.deepspeed_config import PRESETS
from ..options.settings import flatten
from ..options.table import flag_of

Changes: TypeAlias = dict[str, Any]  # settings by their dotted names
# Tokens of a micro-batch.
_FEWEST_ON_GPU, _FEWEST_ON_CPU = 2048, 256


@dataclass(frozen=True)
class Situation:
    """The facts that decide which remedies there are."""

    config: Config
    stage: int  # of ZeRO
    ranks: int
    tokens: int  # in the largest micro-batch
    device: str = "cuda"
    can_recompute: bool = True  # as some architectures of transformers cannot

    @property
    def spreads_weights(self) -> bool:
        """Whether ZeRO 3 may cut the weights into parts: packed in 4 bits they stay whole.

        Layers that are compiled need whole weights too.
        """
        return self.config.lora.quantize == "none" and not self.config.model.compile

    @property
    def fewest_tokens(self) -> int:
        """The least micro-batch worth trying: the products of fewer leave the device idle."""
        return _FEWEST_ON_CPU if self.device == "cpu" else _FEWEST_ON_GPU

    @property
    def offloads(self) -> int:
        """How much DeepSpeed already keeps on the CPU: nothing, the optimizer, or weights too."""
        preset = PRESETS.get(self.config.train.deepspeed)
        return len(preset.offloads) if preset else 0


@dataclass(frozen=True)
class Remedy:
    """A change of settings that takes less memory."""

    name: str
    choices: Callable[[Situation], Sequence[Changes]]  # the gentlest first; none: of no use here
    keeps_run: bool = True  # whether a run that has begun may go on with it

    def open_to(self, now: Situation) -> list[Changes]:
        """The choices that are not in use yet."""
        known = flatten(now.config)
        return [one for one in self.choices(now) if any(known[name] != one[name] for name in one)]


def _smaller(now: Situation) -> list[Changes]:
    sizes = [1 << power for power in range((now.tokens - 1).bit_length() - 1, 0, -1)]
    return [{"train.tokens_per_batch": size} for size in sizes if size >= now.fewest_tokens]


def _gradients_spread(now: Situation) -> list[Changes]:
    """On one rank too, where stage 1 keeps gradients in 16 bits beside those in float32."""
    is_useful = now.stage == 1 or (not now.stage and now.ranks > 1)
    return [{"train.deepspeed": "zero2"}] if is_useful else []


def _weights_spread(now: Situation) -> list[Changes]:
    """Not where the optimizer is on the CPU: it would move back."""
    is_useful = now.stage < 3 and now.ranks > 1 and now.spreads_weights and not now.offloads
    return [{"train.deepspeed": "zero3"}] if is_useful else []


def _recomputed(now: Situation) -> list[Changes]:
    return [_RECOMPUTED] if now.can_recompute else []


def _inputs_offloaded(now: Situation) -> list[Changes]:
    """On a CPU the memory that they would move to is the same."""
    is_useful = now.can_recompute and now.device != "cpu"
    return [_RECOMPUTED | {"train.checkpoint_offload": True}] if is_useful else []


def _offloaded(now: Situation) -> list[Changes]:
    is_new = not now.offloads and now.device != "cpu"
    return [{"train.deepspeed": "zero2-offload"}] if is_new else []


def _all_offloaded(now: Situation) -> list[Changes]:
    is_new = now.offloads < 2 and now.spreads_weights and now.device != "cpu"
    return [{"train.deepspeed": "zero3-offload"}] if is_new else []


def _short_states(now: Situation) -> list[Changes]:
    """Only ZeRO 2 and 3 keep them so."""
    whole = {"train.deepspeed": "zero2"} if now.stage < 2 else {}
    return [{"train.optimizer_dtype": "bfloat16"} | whole]


def _packed(now: Situation) -> list[Changes]:
    whole = {"train.deepspeed": "zero2"} if now.stage == 3 else {}
    return [{"lora.enabled": True, "lora.quantize": "nf4"} | whole]


_RECOMPUTED = {"train.gradient_checkpointing": True}
SMALLER = Remedy("smaller micro-batches", _smaller)
REMEDIES = (
    SMALLER,
    Remedy("ZeRO 2", _gradients_spread),
    Remedy("activations recomputed", _recomputed),
    Remedy("ZeRO 3", _weights_spread),
    Remedy("activations recomputed, and their inputs kept on the CPU", _inputs_offloaded),
    Remedy("the optimizer on the CPU", _offloaded, keeps_run=False),
    Remedy("weights and the optimizer on the CPU", _all_offloaded, keeps_run=False),
    Remedy("the optimizer's states in bfloat16", _short_states, keeps_run=False),
    Remedy("LoRA", lambda _: [{"lora.enabled": True}], keeps_run=False),
    Remedy("LoRA on weights in 4 bits", _packed, keeps_run=False),
)


@dataclass(frozen=True)
class Attempt:
    """Remedies to be tried together."""

    remedies: tuple[Remedy, ...]
    choices: tuple[Changes, ...]  # the gentlest first

    def __str__(self) -> str:
        return ", ".join(remedy.name for remedy in self.remedies)


def attempts(now: Situation, remedies: Sequence[Remedy] = REMEDIES) -> Iterator[Attempt]:
    """All sets of remedies; one is tried once no set of those before its last one will do.

    The order is that of counting up in binary, where each remedy is a digit.
    """
    known = [(one, choices) for one in remedies if (choices := one.open_to(now))]
    for number in range(1, 1 << len(known)):
        chosen = [pair for place, pair in enumerate(known) if number >> place & 1]
        names = [name for _, choices in chosen for name in choices[0]]
        if len({*names}) < len(names):  # two values for one setting
            continue
        merged = [
            {name: value for one in each for name, value in one.items()}
            for each in product(*(choices for _, choices in chosen))
        ]
        yield Attempt(tuple(remedy for remedy, _ in chosen), tuple(merged))


def changed(config: Config, changes: Changes) -> Config:
    """The config with other values of some settings."""
    for name, value in changes.items():
        section, _, key = name.partition(".")
        options = replace(getattr(config, section), **{key: value})
        config = replace(config, **{section: options})
    return config


def flags_of(changes: Changes, given_by_set: Collection[str] = ()) -> str:
    """The words of `align train` for them; one that was given by --set is only changed by --set."""
    return " ".join(_flag(name, value, name in given_by_set) for name, value in changes.items())


def _flag(name: str, value: Any, is_set: bool) -> str:
    flag = "" if is_set else flag_of(name, "train")
    if not flag:
        return f"--set {name}={str(value).lower() if isinstance(value, bool) else value}"
    return flag if value is True else f"{flag} {value}"


def memory_savers(now: Situation) -> Iterator[str]:
    """Flags for a run that has already tried smaller micro-batches."""
    said: list[Changes] = []
    anew = "in a new run, with another --output, "
    for remedy in REMEDIES:
        for changes in remedy.open_to(now) if remedy is not SMALLER else ():
            if not any(one.items() <= changes.items() for one in said):  # one step at a time
                said.append(changes)
                yield f"{'' if remedy.keeps_run else anew}{flags_of(changes)}"
    yield f"{anew}a cache with a shorter tokens.max_length"
