"""The memory that a training needs on each GPU, for every ZeRO stage and way to save memory.

Worked out from the settings, the policy's config.json and the lengths of the rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.methods import Head
from ...schemas.rows import Tree
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.engine.deepspeed_config import PRESETS, EngineContext, engine_config
from ...stages.engine.engine_memory import Elements, EngineMemory, Setting, engine_memory
from ...stages.model.loading.load import DTYPES, empty_model
from ...stages.model.loading.model_folder import model_config
from ...stages.model.logprobs import ScoringPath, causal_model
from ...stages.model.memory.memory_trace import (
    Moment,
    Trace,
    UntracedError,
    refused_in_words,
    trace,
)
from ...stages.model.policy import as_it_learns
from ...stages.model.transformers_compat import can_recompute, recompute_activations

Learning = Literal["full", "lora", "qlora"]
PACKED_BYTES = 0.5 + (1 + 4 / 256) / 64  # of a weight in nf4, its quantized scales included


@dataclass(frozen=True)
class Way:
    """One way to train."""

    learning: Learning
    deepspeed: str
    checkpointing: bool

    @property
    def spreads_weights(self) -> bool:
        """Whether it is a preset by which each rank holds a part of the weights."""
        return self.deepspeed in PRESETS and PRESETS[self.deepspeed].stage == 3

    @property
    def offloads(self) -> bool:
        """Whether it is a preset by which something waits in the CPU's memory."""
        return self.deepspeed in PRESETS and bool(PRESETS[self.deepspeed].offloads)

    def __str__(self) -> str:
        learning = "" if self.learning == "full" else f", {self.learning}"
        return f"{self.deepspeed}{learning}{', checkpointing' if self.checkpointing else ''}"


@dataclass(frozen=True)
class Components:
    """Bytes on one GPU at the moment when the most are used; `host` is the CPU's memory."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    masks: int
    buffers: int
    host: int

    @property
    def peak(self) -> int:
        """All of them on the GPU."""
        total: int = sum(vars(self).values()) - self.host
        return total


@dataclass(frozen=True)
class Planned:
    """Inputs of a plan: everything but the way to train."""

    model: ModelOptions
    train: TrainOptions
    lora: LoraOptions
    dtype: str
    device: str
    ranks: int
    head: Head
    layout: str  # as a `ScoringPath` has it
    trees: Sequence[Tree]  # of the largest micro-batch
    micro_batches: int


class MemoryPlanner:
    """Plans the memory of ways to train."""

    def __init__(self, planned: Planned, policy: TracedPolicy | None = None) -> None:
        self.planned = planned
        self._policy = policy or _known_policy(_Traced.of(planned))

    def changed(
        self, train: TrainOptions, lora: LoraOptions, trees: Sequence[Tree], micro_batches: int
    ) -> MemoryPlanner:
        """The planner of other settings for the same policy; what was traced is not traced anew."""
        planned = replace(
            self.planned, train=train, lora=lora, trees=trees, micro_batches=micro_batches
        )
        return MemoryPlanner(planned, self._policy)

    @cached_property
    def own_way(self) -> Way:
        """The way of the settings."""
        lora = self.planned.lora
        learning: Learning = "full"
        if lora.enabled:
            learning = "qlora" if lora.quantize != "none" else "lora"
        train = self.planned.train
        chosen = train.deepspeed
        if chosen == "auto":
            way = Way(learning, chosen, train.recomputes)
            chosen = f"zero{self.setting(way).stage}"
        return Way(learning, chosen, train.recomputes)

    def ways(self) -> Iterator[Way]:
        """All that the table compares."""
        for learning in ("full", "lora", "qlora"):
            for deepspeed in PRESETS:
                for checkpointing in (False, True):
                    way = Way(learning, deepspeed, checkpointing)
                    if learning != "qlora" or not way.spreads_weights:
                        yield way

    @property
    def vocabulary(self) -> int:
        """Tokens that the policy's head knows."""
        config = causal_model(self._policy.model(is_adapted=False)).config
        return int(config.get_text_config(decoder=True).vocab_size)

    @property
    def can_recompute(self) -> bool:
        """Whether the policy's layers can run again in the backward pass."""
        return can_recompute(causal_model(self._policy.model(is_adapted=False)))

    def is_possible(self, way: Way) -> bool:
        """Whether its ZeRO stage runs the optimizer and weights in 4 bits, and layers run again."""
        if way.checkpointing and not self.can_recompute:
            return False
        try:
            stage = self.setting(way).stage
        except UsageError:
            return False
        return way.learning != "qlora" or stage < 3

    def elements(self, learning: Learning) -> Elements:
        """Counts the parameters, those that learn apart."""
        return self._policy.elements(learning)

    def components(self, way: Way) -> Components:
        """The memory of one GPU at the peak."""
        return at_peak(*self.parts(way), self.planned.micro_batches)

    def constant(self, way: Way) -> EngineMemory:
        """The memory that does not depend on the micro-batch."""
        return engine_memory(self.elements(way.learning), self.setting(way))

    def parts(self, way: Way) -> tuple[EngineMemory, Trace]:
        """The constant memory, and that of a micro-batch."""
        engine = self.constant(way)
        traced = self._policy.trace(
            self.planned.trees,
            is_adapted=way.learning != "full",
            checkpointing=way.checkpointing,
        )
        if way.checkpointing and self.planned.train.offloads_inputs:
            engine, traced = replace(engine, host=engine.host + traced.kept), traced.without_kept()
        return engine, traced

    def setting(self, way: Way) -> Setting:
        """The engine settings for DeepSpeed."""
        planned = self.planned
        train = replace(planned.train, deepspeed=way.deepspeed)
        size = hidden_size(self._policy.model(is_adapted=way.learning != "full"))
        found = EngineContext(planned.dtype, size, planned.ranks, planned.device)
        config = engine_config(train, found)
        itemsize = DTYPES[planned.dtype].itemsize
        setting = Setting.of(config, ranks=planned.ranks, itemsize=itemsize, device=planned.device)
        return setting.with_optimizer(train)


@dataclass(frozen=True)
class _Traced:
    """What the traces of a policy follow from, besides the micro-batch and the way to train."""

    key: str
    planned: Planned = field(compare=False)

    @staticmethod
    def of(planned: Planned) -> _Traced:
        dropout, lora = planned.train.dropout, replace(planned.lora, enabled=True)
        of_model = (planned.model, model_config(planned.model.path), planned.dtype, planned.head)
        return _Traced(repr((*of_model, planned.layout, planned.device, dropout, lora)), planned)


@lru_cache(maxsize=4)
def _known_policy(traced: _Traced) -> TracedPolicy:
    """The runs of a sweep follow one another in one process: most train the same policy."""
    return TracedPolicy(traced.planned)


class TracedPolicy:
    """A policy without weights; each of its micro-batches is traced once."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned  # whose way to train and whose trees are not looked at
        self._models: dict[Hashable, nn.Module] = {}
        self._elements: dict[Learning, Elements] = {}
        self._traces: dict[Hashable, Trace | str] = {}  # or why there is none

    def elements(self, learning: Learning) -> Elements:
        """Counts the parameters, those that learn apart."""
        if learning not in self._elements:
            model = self.model(is_adapted=learning != "full")
            self._elements[learning] = elements_of(model, packs=learning == "qlora")
        return self._elements[learning]

    def model(self, *, is_adapted: bool, checkpointing: bool = False) -> nn.Module:
        """The model on the meta device."""
        key = (is_adapted, checkpointing)
        if key not in self._models:
            planned = self._planned
            kind: Any = AutoModelForCausalLM
            if planned.head == "score":
                kind = AutoModelForSequenceClassification
            lora = replace(planned.lora, enabled=is_adapted)
            with refused_in_words():
                empty = empty_model(planned.model, planned.dtype, kind)
                model = as_it_learns(empty, planned.train, lora)
            if checkpointing:
                recompute_activations(causal_model(model))
            self._models[key] = model
        return self._models[key]

    def trace(self, trees: Sequence[Tree], **way: bool) -> Trace:
        """The memory of one micro-batch of the model that `model` gives for this way."""
        shapes = tuple((len(tree.prompt), *map(len, tree.branches)) for tree in trees)
        model = self.model(**way)
        key = (id(model), shapes)  # each is kept
        if key not in self._traces:
            try:
                self._traces[key] = trace(model, trees, self._path, device=self._planned.device)
            except UntracedError as error:  # the next run of a sweep does not wait for it again
                self._traces[key] = str(error)
        known = self._traces[key]
        if isinstance(known, str):
            raise UntracedError(known)
        return known

    @property
    def _path(self) -> ScoringPath:
        layout: Any = self._planned.layout
        return ScoringPath(layout, "score" if self._planned.head == "score" else "fused")


def elements_of(
    model: nn.Module, *, packs: bool, numel: Callable[[Tensor], int] = Tensor.numel
) -> Elements:
    """Counts each parameter once; `packs`: frozen matrices of layers are kept in 4 bits."""
    learning = [numel(one) for one in model.parameters() if one.requires_grad]
    frozen = sum(numel(one) for one in model.parameters() if not one.requires_grad)
    packed, packed_bytes = _packed(model) if packs else 0, 0
    # Those that are in 4 bits already know their shape, and hold two elements in a byte.
    for one in model.parameters():
        if (state := getattr(one, "quant_state", None)) is not None:
            packed, packed_bytes = packed + math.prod(state.shape), packed_bytes + one.nbytes
            frozen += math.prod(state.shape) - one.numel()
    return Elements(
        learning=sum(learning),
        frozen=frozen,
        largest=max(learning, default=0),
        packed=packed,
        packed_bytes=packed_bytes or round(packed * PACKED_BYTES),
    )


def _packed(model: nn.Module) -> int:
    head = causal_model(model).get_output_embeddings()
    layers = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not head]
    return sum(one.weight.numel() for one in layers if not one.weight.requires_grad)


def hidden_size(model: nn.Module) -> int:
    """The width of the text part."""
    return int(causal_model(model).config.get_text_config(decoder=True).hidden_size)


def at_peak(engine: EngineMemory, traced: Trace, micro_batches: int) -> Components:
    """The largest of the moments of a step: its first micro-batch, a later one, the update."""
    moments = list(_moments(engine, traced, micro_batches))
    return max(moments, key=lambda one: one.peak)


def _moments(engine: EngineMemory, traced: Trace, micro_batches: int) -> Iterator[Components]:
    nothing = Moment(0, 0, 0)
    for moment in traced.moments:
        gradients = engine.first + engine.per_finished * moment.finished
        extra = engine.at_gradient + engine.at_first_gradient if moment.finished else 0
        yield _components(engine, traced, moment, gradients + extra)
        if micro_batches > 1:
            more = engine.at_gradient if moment.finished else 0
            yield _components(engine, traced, moment, engine.later + more)
    yield _components(engine, traced, nothing, engine.update)


def _components(engine: EngineMemory, traced: Trace, moment: Moment, gradients: int) -> Components:
    masks = min(traced.masks, moment.layers)
    return Components(
        weights=engine.weights,
        gradients=gradients,
        optimizer=engine.optimizer,
        activations=moment.layers - masks,
        head=moment.head + traced.buffer,
        masks=masks,
        buffers=engine.buffers,
        host=engine.host,
    )
