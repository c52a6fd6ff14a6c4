"""Estimates the memory of a training on each rank, and chooses `auto` settings that fit.

`align train` and `align plan` make the same choices here, and only choices that do not change the
numbers of a training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ...schemas.batches import World
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.engine.deepspeed_config import PRESETS, EngineContext, engine_config, stage_of
from ...stages.engine.engine_memory import Elements, elements_of, engine_memory
from ...stages.feed.cache_index import RowTable
from ...stages.methods.objective import Objective
from ...stages.model.cheap_again import drops_cheap
from ...stages.model.fused_head import BUFFER_BYTES
from ...stages.model.load import DTYPES, empty_model
from ...stages.model.logprobs import ScoringPath, causal_model
from ...stages.model.micro_batch import Kept, UntracedError, head_bytes, kept, untraced
from ...stages.model.model_folder import model_config
from ...stages.model.policy import prepare_for_training
from ..options.settings import changed, flatten
from ..options.settings_table import as_flags
from .setting_checks import bytes_of
from .workload import RowShape, Workload, feed_settings, planned_tokens, workload_of

logger = logging.getLogger("align")

USABLE = 0.93  # of a GPU: CUDA's own memory and gaps between tensors take the rest
PACKED_BYTES = 0.5 + (1 + 4 / 256) / 64  # per nf4 weight, with its quantized scales
MEASURED_TOKENS = 2048  # the kept bytes of a micro-batch are proportional to its tokens
IN_FLIGHT = 3  # gradients of the largest activation at once, while a layer runs backward
# The memory of a CPU process beside tensors: libraries, and freed blocks of activations, which the
# C library keeps, with gaps between them.
LIBRARIES, GAPS = 600 << 20, 0.35
FEWEST_TOKENS = {"cpu": 256}  # of a micro-batch; 2048 on other devices, which idle with fewer

TOKENS, RECOMPUTE = "train.tokens_per_batch", "train.gradient_checkpointing"
INPUTS, ZERO = "train.checkpoint_offload", "train.deepspeed"
# The settings that may be chosen, with the value that leaves each open.
OPEN = {TOKENS: 0, RECOMPUTE: "auto", INPUTS: "auto", ZERO: "auto"}
Changes: TypeAlias = dict[str, Any]  # settings by their dotted names
# Settings that take less memory, the cheapest first; each is tried with smaller micro-batches too.
LADDER: tuple[Changes, ...] = (
    {},
    {ZERO: "zero2"},
    {RECOMPUTE: True},
    {ZERO: "zero2", RECOMPUTE: True},
    {ZERO: "zero3", RECOMPUTE: True},
    {RECOMPUTE: True, INPUTS: True},
    {ZERO: "zero2", RECOMPUTE: True, INPUTS: True},
    {ZERO: "zero3", RECOMPUTE: True, INPUTS: True},
)
# Settings that take even less, but are much slower or change the numbers: only advice names them.
ADVICE: tuple[Changes, ...] = (
    {ZERO: "zero2-offload"},
    {ZERO: "zero3-offload"},
    {ZERO: "zero2", "train.optimizer_dtype": "bfloat16"},
    {"lora.enabled": True},
    {"lora.enabled": True, "lora.quantize": "nf4"},
)


@dataclass(frozen=True)
class Budget:
    """The memory of a GPU, or of a process on a CPU; 0 bytes: no limit."""

    size: int = 0
    is_asked: bool = False  # set by train.memory instead of the device

    @staticmethod
    def of(train: TrainOptions, device_bytes: int) -> Budget:
        """The budget of train.memory, or of the device if that is less; 0: unknown."""
        asked = bytes_of(train.memory, name="train.memory")
        known = [size for size in (asked, device_bytes) if size]
        return Budget(min(known, default=0), bool(asked))

    @property
    def usable(self) -> int:
        """The bytes that a training can fill."""
        return int(USABLE * self.size)

    def holds(self, estimate: Estimate) -> bool:
        """Whether a training with this estimate fits."""
        return not self.size or estimate.peak <= self.usable

    def __str__(self) -> str:
        return f"{amount(self.usable)} usable ({USABLE:.0%} of {amount(self.size)})"


def host_bytes() -> int:
    """The memory of this machine, or the limit of its container."""
    found = [int(psutil.virtual_memory().total)]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            found.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(found)


@dataclass(frozen=True)
class PlanFacts:
    """The inputs of a plan beside the settings."""

    policy: ModelOptions
    dtype: str
    objective: Objective
    table: RowTable  # of all training rows, or of the first ones
    rows: int
    held_out: int
    device: str
    ranks: int
    budget: Budget = Budget()
    host: int = 0  # bytes of CPU memory for each rank of a machine; 0: unknown
    resumed: str = ""  # the preset of a resumed run, which it keeps
    workloads: dict[Any, Workload] = field(default_factory=dict)  # by settings of the feed

    def workload(self, train: TrainOptions) -> Workload:
        """The steps and micro-batches under these settings."""
        tokens, world = planned_tokens(train, self.device), World(0, self.ranks, 0)
        feed = feed_settings(train, self.objective, world, tokens=tokens, pads=False)
        if (key := (feed, train.max_steps)) not in self.workloads:
            self.workloads[key] = workload_of(
                self.table, feed, train, rows=self.rows, held_out=self.held_out
            )
        return self.workloads[key]


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of one rank; `host`: in the CPU's memory."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    buffers: int
    process: int  # on a CPU: memory beside tensors
    host: int

    @property
    def peak(self) -> int:
        """The total on the device."""
        total: int = sum(getattr(self, one.name) for one in fields(self)) - self.host
        return total


@dataclass(frozen=True)
class Planned:
    """Settings with changes, and their estimate."""

    config: Config
    changes: Changes
    workload: Workload
    estimate: Estimate


def planned(config: Config, facts: PlanFacts, changes: Changes | None = None) -> Planned:
    """The plan of these settings; every `auto` is decided as without a limit."""
    config = changed(config, changes or {})
    work = facts.workload(config.train)
    return Planned(config, changes or {}, work, estimate(config, facts, work))


def estimate(config: Config, facts: PlanFacts, work: Workload) -> Estimate:
    """The peak memory of a step."""
    train, device = config.train, facts.device
    policy = measured_policy(config, facts, work.row)
    context = EngineContext(facts.dtype, policy.hidden_size, facts.ranks, device)
    settings = engine_config(train, context)
    engine = engine_memory(
        policy.elements(config.lora.quantize),
        settings,
        train,
        ranks=facts.ranks,
        itemsize=DTYPES[facts.dtype].itemsize,
        device=device,
    )
    is_partitioned = stage_of(settings) == 3
    if train.recomputes:
        keeps = policy.recomputing
    elif drops_cheap(device, is_partitioned=is_partitioned):
        keeps = policy.dropping
    else:
        keeps = policy.keeping
    if keeps is None:
        raise UsageError(
            "train.gradient_checkpointing: this architecture does not support it. Set it to false."
        )
    times = work.micro_tokens / keeps.tokens
    activations = round(keeps.whole * times)
    in_layer = round((keeps.in_layer + IN_FLIGHT * keeps.largest) * times)
    host = 0
    if train.offloads_inputs and device != "cpu":
        activations, host = 0, activations
    head = of_weight = buffer = 0
    if policy.head is not None:
        head = head_bytes(policy.head, round(work.micro_tokens * work.predicted), device=device)
        of_weight = policy.head.nbytes if policy.head.requires_grad else 0
        buffer = BUFFER_BYTES
    # (gradients, activations, head): the head runs backward first, then the layers. The gradient of
    # the head's weight stays in memory, unless it is sharded at once. A tied head's gradient waits
    # for the embedding's; then both are in memory, and their sum beside the earlier sum.
    waiting = of_weight if policy.is_tied else 0
    last = engine.arriving + policy.trained.largest * DTYPES[facts.dtype].itemsize + waiting
    moments = [
        (engine.first, activations, head),
        (engine.first + engine.arriving_first + of_weight, activations + in_layer, 0),
        (engine.gradients + last, 0, 0),
    ]
    if work.micro_batches > 1:  # gradients of earlier micro-batches are in memory
        more = engine.arriving + of_weight if engine.arriving else waiting
        moments += [
            (engine.gradients, activations, head),
            (engine.gradients + more, activations + in_layer, 0),
            (engine.gradients + last + waiting, 0, 0),
        ]
    found = [(*moment, engine.gathered) for moment in moments] + [(engine.update, 0, 0, 0)]
    gradients, activations, head, gathered = max(found, key=sum)
    process = 0
    if device == "cpu":
        held = max(one[1] for one in moments)
        process = LIBRARIES + round((1 + GAPS) * held) - activations
    return Estimate(
        weights=engine.weights,
        gradients=gradients,
        optimizer=engine.optimizer,
        activations=activations,
        head=head + buffer,
        buffers=engine.buffers + gathered,
        process=process,
        host=engine.host + host,
    )


@dataclass(frozen=True)
class MeasuredPolicy:
    """Measures of a policy without weights: its parameters and its layers' kept bytes."""

    trained: Elements
    packed: int  # elements of frozen layers that can be quantized to 4 bits
    hidden_size: int
    head: Tensor | None  # weight of the fused head; None for a model that scores
    is_tied: bool  # whether the head is tied to the embedding
    keeping: Kept
    dropping: Kept  # without cheap activations
    recomputing: Kept | None  # with gradient checkpointing, if the model supports it

    def elements(self, quantize: str) -> Elements:
        """Counts of the parameters; with `quantize`, frozen ones count as 4 bits."""
        if quantize == "none":
            return self.trained
        return replace(
            self.trained, packed=self.packed, packed_bytes=round(self.packed * PACKED_BYTES)
        )


_measured: dict[str, MeasuredPolicy | UntracedError] = {}


def measured_policy(config: Config, facts: PlanFacts, row: RowShape) -> MeasuredPolicy:
    """The measured policy of these settings; a sweep's runs in one process share it."""
    train, lora = config.train, replace(config.lora, quantize="none")
    of_model = facts.policy, model_config(facts.policy.path), facts.dtype, facts.objective.head
    key = repr((of_model, facts.device, row, train.dropout, lora if lora.enabled else None))
    if key not in _measured:
        try:
            _measured[key] = _measure(train, lora, facts, row)
        except UntracedError as error:
            _measured[key] = error
    found = _measured[key]
    if isinstance(found, UntracedError):
        raise found
    return found


def _measure(
    train: TrainOptions, lora: LoraOptions, facts: PlanFacts, row: RowShape
) -> MeasuredPolicy:
    scores = facts.objective.head == "score"
    kind: Any = AutoModelForSequenceClassification if scores else None
    adapter = lora.continued(facts.policy.adapter)
    with untraced():
        empty = empty_model(facts.policy, facts.dtype, kind)
        model = prepare_for_training(empty, train, lora, adapter)
    inner = causal_model(model)
    head = None if scores else inner.get_output_embeddings().weight
    layers = [one.weight for one in model.modules() if isinstance(one, nn.Linear)]
    packed = sum(one.numel() for one in layers if one is not head and not one.requires_grad)
    path = ScoringPath(
        "packed" if facts.device == "cpu" else "flex", "score" if scores else "fused"
    )
    keeps = kept(model, row.rows(MEASURED_TOKENS), path)
    size = inner.config.get_text_config(decoder=True).hidden_size
    is_tied = head is inner.get_input_embeddings().weight
    return MeasuredPolicy(elements_of(model), packed, size, head, is_tied, *keeps)


@dataclass(frozen=True)
class Choice:
    """The decided `auto` settings of a training, with the reasons."""

    budget: Budget
    given: Planned  # the settings without a limit
    nearest: Planned  # the first `auto` choice that fits, or else the smallest
    advice: Planned | None  # if no choice fits: other settings that do, or the smallest

    @property
    def fits(self) -> bool:
        """Whether the training fits, or no limit is known."""
        return self.budget.holds(self.nearest.estimate)

    @property
    def found(self) -> Planned:
        """The nearest plan if it fits; else the given settings, as an estimate may be too high."""
        return self.nearest if self.fits else self.given

    @property
    def changes(self) -> Changes:
        """The decided settings."""
        return {**decided(self.given.config.train), **self.found.changes}

    def require_fitting(self) -> None:
        """Refuses a training that does not fit into train.memory."""
        if self.budget.is_asked and not self.fits:
            raise UsageError(f"train.memory: {'; '.join(self.lines())}.")

    def lines(self) -> Iterator[str]:
        """Lines on the choice, its reason, and other settings that would fit."""
        if not self.budget.size:
            return
        peak, flags = self.found.estimate.peak, as_flags(self.found.changes, "train")
        needs = f"{amount(peak)} planned of the {self.budget}"
        if not self.fits:
            yield f"does not fit: {needs}, {amount(peak - self.budget.usable)} too much"
            yield from self.what_else()
        elif flags:
            without = amount(self.given.estimate.peak)
            yield f"chosen to fit: {flags}: {needs}; without, {without}"
        else:
            yield f"fits: {needs}"

    def what_else(self) -> Iterator[str]:
        """If no `auto` choice fits: the nearest one, and settings that would fit."""
        for start, one in (("auto comes nearest by", self.nearest), ("", self.advice)):
            if one and one.changes:
                peak = one.estimate.peak
                over = peak - self.budget.usable
                verdict = "fits" if over <= 0 else f"{amount(over)} too large"
                flags = as_flags(one.changes, "train")
                yield f"{start or 'with'} {flags}: {amount(peak)}, {verdict}"
        if not (self.advice and self.budget.holds(self.advice.estimate)):
            yield "use larger or more GPUs, a smaller model, or shorter rows"


def chosen(config: Config, facts: PlanFacts) -> Choice:
    """Decides every `auto`: the first settings of LADDER that fit, or those that come nearest."""
    budget, given = facts.budget, planned(config, facts)
    if budget.holds(given.estimate):
        return Choice(budget, given, given, None)
    known = flatten(config)
    nearest = _climbed(facts, given, {name for name in OPEN if known[name] == OPEN[name]})
    if budget.holds(nearest.estimate):
        return Choice(budget, given, nearest, None)
    advice = nearest
    further = () if facts.resumed else ADVICE
    for changes in ({}, *further):
        if changes and not is_useful(changes, config, ranks=facts.ranks, device=facts.device):
            continue
        try:
            start = planned(config, facts, changes)
        except UsageError:  # DeepSpeed or this architecture does not support the combination
            continue
        is_open = {*OPEN} - changes.keys() - ({ZERO} if facts.resumed else set())
        best = _climbed(facts, start, is_open)
        advice = min(advice, best, key=lambda one: one.estimate.peak)
        if budget.holds(advice.estimate):
            break
    return Choice(budget, given, nearest, None if advice is nearest else advice)


def _climbed(facts: PlanFacts, start: Planned, is_open: set[str]) -> Planned:
    """The plan with the first rung of open settings that fits; else that with the lowest peak."""
    config, known = start.config, flatten(start.config)
    if config.train.dropout:  # its masks depend on the micro-batches
        is_open = is_open - {TOKENS}
    best = start
    least = FEWEST_TOKENS.get(facts.device, 2048)
    for rung in LADDER:
        new = {name: value for name, value in rung.items() if known[name] != value}
        is_right = is_useful(rung, config, ranks=facts.ranks, device=facts.device)
        if new.keys() - is_open or (new and not is_right):
            continue
        try:
            one = planned(config, facts, new)
        except UsageError:
            continue
        top = (one.workload.micro_tokens - 1).bit_length() if TOKENS in is_open else 0
        sizes = [1 << power for power in range(top - 1, 0, -1) if 1 << power >= least]
        for tokens in (0, *sizes):
            if tokens:
                one = planned(config, facts, {**new, TOKENS: tokens})
            if INPUTS in new and 0 < facts.host < one.estimate.host:
                continue
            if one.estimate.peak < best.estimate.peak or facts.budget.holds(one.estimate):
                best = replace(one, changes={**start.changes, **one.changes})
            if facts.budget.holds(best.estimate):
                return best
    return best


def is_useful(changes: Changes, config: Config, *, ranks: int, device: str) -> bool:
    """Whether these settings are not in use yet, and can take less memory here."""
    known = flatten(config)
    preset, now = PRESETS.get(changes.get(ZERO, "")), PRESETS.get(config.train.deepspeed)
    offloaded = len(now.offloads) if now else 0
    cannot_shard = config.lora.quantize != "none"
    is_merged = "lora.enabled" in changes and config.lora.start == "merge"  # and has no base
    if is_merged or all(known[name] == value for name, value in changes.items()):
        return False
    if device == "cpu" and (INPUTS in changes or (preset and preset.offloads)):
        return False  # it would move within the same memory
    if preset is None:
        return True
    if preset.offloads:
        return len(preset.offloads) > offloaded and not (preset.stage == 3 and cannot_shard)
    if preset.stage == 3:
        return ranks > 1 and not cannot_shard and not offloaded
    return True


def decided(train: TrainOptions) -> Changes:
    """Without a plan, an `auto` of gradient checkpointing means no."""
    return {RECOMPUTE: train.recomputes, INPUTS: train.offloads_inputs}


def amount(size: float) -> str:
    """Bytes as GiB, or as MiB if small."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
