"""The values of settings that are `auto`, chosen to fit into the memory by the plan.

`align train` and `align plan` choose here, from the same facts, and only what leaves the numbers
of a training as they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ...schemas.batches import World
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from ...stages.feed.cache_index import RowTable
from ...stages.methods.recipe import Recipe
from ..options.settings import flatten
from .memory_plan import Components, MemoryPlanner, Planned
from .memory_search import MemoryLimits, Tried, search
from .remedies import REMEDIES, Attempt, Changes, Remedy, Situation, changed, flags_of
from .setting_checks import bytes_of
from .workload import Workload, feed_settings, planned_tokens, workload_of

logger = logging.getLogger("align")

USABLE = 0.93  # of a GPU: CUDA's own memory and gaps between tensors take the rest
# The settings that may be chosen, by the value that leaves them open.
OPEN = {
    "train.tokens_per_batch": 0,
    "train.gradient_checkpointing": "auto",
    "train.checkpoint_offload": "auto",
    "train.deepspeed": "auto",
}


@dataclass(frozen=True)
class Budget:
    """The memory of a GPU, or of a process on a CPU; 0 bytes: no limit."""

    size: int = 0
    is_asked: bool = False  # by train.memory, and not just what the device has

    @staticmethod
    def of(train: TrainOptions, device_bytes: int) -> Budget:
        """The one of train.memory, or else of the device."""
        asked = bytes_of(train.memory, name="train.memory")
        return Budget(asked or device_bytes, bool(asked))

    def within(self, device_bytes: int) -> Budget:
        """No more than the device has, where that is known: more cannot be allowed."""
        if not 0 < device_bytes < self.size:
            return self
        logger.warning(
            "train.memory is %s, and the GPU has %s: no more is planned with.",
            amount(self.size),
            amount(device_bytes),
        )
        return replace(self, size=device_bytes)

    @property
    def usable(self) -> int:
        """The bytes that a training can fill."""
        return int(USABLE * self.size)

    def holds(self, components: Components) -> bool:
        """Whether a training that needs so much fits into it."""
        return components.peak <= self.usable

    def __str__(self) -> str:
        return f"{amount(self.usable)} that can be used ({USABLE:.0%} of {amount(self.size)})"


@dataclass(frozen=True)
class PlanFacts:
    """What a plan follows from besides the settings."""

    policy: ModelOptions
    dtype: str
    recipe: Recipe
    table: RowTable  # of all rows to learn from, or of the first
    rows: int
    held_out: int
    device: str
    ranks: int
    budget: Budget = Budget()
    host: float = math.inf  # bytes of the CPU's memory for each rank, where they are known
    begun: str = ""  # the preset that a resumed run has to keep; empty: any
    is_resumed: bool = False


class Planning:
    """The plans of a training under any settings; each micro-batch is traced once."""

    def __init__(self, config: Config, facts: PlanFacts) -> None:
        self.config, self.facts = config, facts
        self._workloads: dict[int, Workload] = {}

    def workload(self, train: TrainOptions) -> Workload:
        """The steps and micro-batches."""
        key = train.tokens_per_batch
        if key not in self._workloads:
            facts, world = self.facts, World(0, self.facts.ranks, 0)
            tokens = planned_tokens(train, facts.device)
            feed = feed_settings(train, facts.recipe, world, tokens=tokens, pads=False)
            self._workloads[key] = workload_of(
                facts.table, feed, train, rows=facts.rows, held_out=facts.held_out
            )
        return self._workloads[key]

    def planner(self, config: Config) -> MemoryPlanner:
        """The planner of these settings."""
        work = self.workload(config.train)
        return self._planner.changed(config.train, config.lora, work.trees(), work.micro_batches)

    @cached_property
    def _planner(self) -> MemoryPlanner:
        facts, work = self.facts, self.workload(self.config.train)
        return MemoryPlanner(
            Planned(
                replace(facts.policy, adapter="", device_map=""),
                self.config.train,
                self.config.lora,
                dtype=facts.dtype,
                device=facts.device,
                ranks=facts.ranks,
                head=facts.recipe.head,
                layout="flex" if facts.device == "cuda" else "packed",
                trees=work.trees(),
                micro_batches=work.micro_batches,
            )
        )

    def situation(self, config: Config) -> Situation:
        """What decides which remedies these settings leave."""
        work, planner = self.workload(config.train), self.planner(config)
        return Situation(
            config,
            stage=planner.setting(planner.own_way).stage,
            ranks=self.facts.ranks,
            tokens=work.micro_tokens,
            device=self.facts.device,
            can_recompute=planner.can_recompute,
        )

    def as_they_are(self, config: Config) -> Tried:
        """The memory that settings need, what is `auto` in them as without a limit."""
        planner = self.planner(config)
        way = planner.own_way
        return Tried(Attempt((), ({},)), {}, way, planner.components(way))

    def fitting(self, config: Config, remedies: Sequence[Remedy] = REMEDIES) -> Tried:
        """The settings as they are if they fit, else with the first remedies that do, or nearly."""
        own, budget = self.as_they_are(config), self.facts.budget
        if budget.holds(own.components):
            return own
        limits = MemoryLimits(budget.usable, USABLE * self.facts.host)
        return search(self.situation(config), self.planner, limits, own, remedies)


@dataclass(frozen=True)
class Choice:
    """The settings of a training whose `auto` is decided, and why."""

    planning: Planning
    start: Config  # as given, on the preset of the run that is resumed
    given: Tried  # what these need
    nearest: Tried  # of what may be chosen: the first that fits, or else the smallest
    remedy: Tried | None  # where it does not fit: what the user may change

    @property
    def budget(self) -> Budget:
        """The memory that there is."""
        return self.planning.facts.budget

    @property
    def found(self) -> Tried:
        """What to train by: what fits, or else the settings as they are.

        An optimizer on the CPU makes every step slower, for no gain where memory runs out anyway;
        and where the plan is too high, the settings as they are may fit.
        """
        return self.nearest if self.fits else self.given

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as a limit is known."""
        return not self.budget.size or self.budget.holds(self.nearest.components)

    @property
    def changes(self) -> Changes:
        """The settings that are decided."""
        begun = self.start.train.deepspeed
        is_kept = begun != self.planning.config.train.deepspeed
        kept = {"train.deepspeed": begun} if is_kept else {}
        return {**decided(self.planning.config.train), **kept, **self.found.changes}

    @property
    def config(self) -> Config:
        """The settings to train by."""
        return changed(self.planning.config, self.changes)

    def require_fitting(self) -> None:
        """Refuses what does not fit into the memory that train.memory allows."""
        if self.budget.is_asked and not self.fits:
            lines = "\n".join(self.lines())
            raise UsageError(f"train.memory: {lines}")

    def lines(self) -> Iterator[str]:
        """What was chosen and why, and what else would fit."""
        if not self.budget.size:
            return
        found, needs = self.found, self.found.components
        chosen = f"{found.attempt} ({flags_of(found.changes)})" if found.changes else ""
        host = f", and {amount(needs.host)} on the CPU" if needs.host else ""
        planned = f"{amount(needs.peak)} planned of the {self.budget}{host}"
        if not self.fits:
            over = amount(needs.peak - self.budget.usable)
            yield f"does not fit: {planned}, {over} too much; {self._too_little()}"
        elif chosen:
            before = amount(self.given.components.peak)
            yield f"chosen to fit: {chosen}: {planned}; without, {before}"
        else:
            yield f"fits: {planned}"
        yield from self.advice()

    def _too_little(self) -> str:
        """What comes of `auto` where nothing that it may choose fits."""
        near = self.nearest
        kept = "" if self.budget.is_asked else ". What is auto stays as without a plan"
        if not near.changes:
            return f"auto may choose nothing that takes less{kept}"
        needs, flags = amount(near.components.peak), flags_of(near.changes)
        return f"nor does the nearest that auto may choose, {needs}: {near.attempt} ({flags}){kept}"

    def advice(self) -> Iterator[str]:
        """What else would fit, or come nearest, as flags to copy."""
        if self.fits and self.found.components.host and not self.planning.facts.is_resumed:
            yield from (f"would fit too: {one}" for one in _others(self))
        elif self.remedy and self.remedy.changes:
            peak, flags = self.remedy.components.peak, flags_of(self.remedy.changes)
            over = peak - self.budget.usable
            verdict = "would fit" if over <= 0 else f"nearest of all, {amount(over)} too large"
            yield f"{verdict}, {amount(peak)}: {self.remedy.attempt} ({flags})"


def decided(train: TrainOptions) -> Changes:
    """What no micro-batch shows: an `auto` of gradient checkpointing without a plan is no."""
    return {
        "train.gradient_checkpointing": train.recomputes,
        "train.checkpoint_offload": train.offloads_inputs,
    }


def chosen(config: Config, facts: PlanFacts) -> Choice:
    """Decides what is `auto`: the first remedies by which the training fits, or the nearest."""
    planning, start = Planning(config, facts), config
    if facts.begun and config.train.deepspeed == OPEN["train.deepspeed"]:
        start = changed(config, {"train.deepspeed": facts.begun})
    given = planning.as_they_are(start)
    if not facts.budget.size:
        return Choice(planning, start, given, given, None)
    remedies = [one for one in REMEDIES if one.keeps_run or not facts.is_resumed]
    nearest = planning.fitting(start, _open_ones(remedies, config))
    remedy = None if facts.budget.holds(nearest.components) else planning.fitting(start, remedies)
    return Choice(planning, start, given, nearest, remedy)


def _others(choice: Choice) -> Iterator[str]:
    """Where the optimizer waits on the CPU: what would do without it, as flags to copy."""
    planning, config = choice.planning, choice.planning.config
    in_place = _open_ones([one for one in REMEDIES if one.keeps_run], config)
    now = planning.situation(choice.start)
    for remedy in REMEDIES:
        for changes in remedy.open_to(now)[:1]:
            other = changed(config, changes)
            planner = planning.planner(other)
            if changes.keys() <= OPEN.keys() or not planner.is_possible(planner.own_way):
                continue
            needs = planning.fitting(other, in_place).components
            if choice.budget.holds(needs):
                yield f"{remedy.name} ({flags_of(changes)}), {amount(needs.peak)}"


def amount(size: float) -> str:
    """Bytes as GiB, or as MiB where that is little."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _open_ones(remedies: Sequence[Remedy], config: Config) -> list[Remedy]:
    """Remedies by those of their choices whose settings are open, or are so already."""
    known = flatten(config)
    is_open = {name for name, value in OPEN.items() if known[name] == value}
    if config.train.dropout:  # which is drawn anew for each micro-batch
        is_open.discard("train.tokens_per_batch")

    def choices(remedy: Remedy, now: Situation) -> list[Changes]:
        return [
            one
            for one in remedy.choices(now)
            if all(name in is_open or known[name] == value for name, value in one.items())
        ]

    return [replace(one, choices=partial(choices, one)) for one in remedies]
