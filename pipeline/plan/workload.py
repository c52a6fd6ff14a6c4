"""Workload of a training: steps, tokens and micro-batches, from the lengths of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import World
from ...schemas.rows import Tree
from ...schemas.train_options import TrainOptions
from ...stages.feed.cache_index import RowSizes, RowTable
from ...stages.feed.step_plan import (
    BatchAssignment,
    FeedSettings,
    Pass,
    StepPlan,
    num_steps,
    rows_seen,
    steps_in,
)
from ...stages.feed.step_plan import training_pass as whole_pass
from ...stages.methods.recipe import Recipe

SAMPLED_STEPS = 32  # of the first epoch, planned as the feed plans them
# A GPU, or the like, wants large products. On a CPU more at once are no faster and take memory.
_ON_GPU, _ON_CPU = 16_384, 2048


@dataclass(frozen=True)
class RowShape:
    """A row of the mean lengths."""

    prompt: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and all completions."""
        return self.prompt + sum(self.completions)


@dataclass(frozen=True)
class Workload:
    """A whole training, over all ranks."""

    rows: int  # to learn from
    held_out: int
    epochs: float
    steps: int
    batch_size: int
    learned_tokens: int
    mismatched_tokens: int  # run without gradients, for KTO's KL term
    micro_batches: int  # of each rank in a step, those without gradients left out
    micro_tokens: int  # of the largest, padding included
    row: RowShape

    @property
    def tokens(self) -> int:
        """All that the policy runs over."""
        return self.learned_tokens + self.mismatched_tokens

    def trees(self) -> list[Tree]:
        """Rows of the mean lengths that fill the largest micro-batch."""
        most = self.micro_tokens
        blank = [np.zeros(size, np.int32) for size in (self.row.prompt, *self.row.completions)]
        tree = Tree(blank[0], tuple(blank[1:]))
        count = max(1, most // self.row.tokens)
        longest = most // count - self.row.prompt
        stretched = self._stretched(longest) if longest > sum(self.row.completions) else tree
        return [stretched] * count

    def _stretched(self, completions: int) -> Tree:
        count = len(self.row.completions)
        sizes = [len(part) for part in np.array_split(np.arange(completions), count)]
        prompt = np.zeros(self.row.prompt, np.int32)
        return Tree(prompt, tuple(np.zeros(size, np.int32) for size in sizes))


def planned_tokens(train: TrainOptions, device: str) -> int:
    """The micro-batch that is asked for, in tokens."""
    return train.tokens_per_batch or (_ON_CPU if device == "cpu" else _ON_GPU)


def feed_settings(
    train: TrainOptions, recipe: Recipe, world: World, *, tokens: int, pads: bool
) -> FeedSettings:
    """The batching: steps, and micro-batches of so many tokens for each rank."""
    return FeedSettings(
        seed=train.seed,
        epochs=train.epochs,
        batch_size=train.batch_size,
        kl_use=recipe.option("kl_use", "rotate"),
        kl_per_step=recipe.option("kl_per_step", 0),
        limit_eval_batches=train.limit_eval_batches,
        tokens_per_batch=tokens,
        pads=pads,
        world=world,
    )


def even_rows(count: int, shape: RowShape, *, num_partners: int) -> RowTable:
    """Rows of one shape, each completion with so many mismatched partners of its length."""
    branches = len(shape.completions)
    lengths = np.tile(np.array(shape.completions, np.int32), count)
    own = np.full(count, sum(shape.completions), np.int32)
    sizes = RowSizes(
        index_in_group=np.arange(count, dtype=np.int32),
        prompt_tokens=np.full(count, shape.prompt, np.int32),
        own_tokens=own,
        learned_tokens=own,
        chosen_tokens=np.full(count, shape.completions[0], np.int32),
        branch_offsets=np.arange(count + 1) * branches,
        mismatched_tokens=np.repeat(lengths[:, None], num_partners, axis=1),
    )
    return RowTable(np.array([0, count]), sizes)


def workload_of(
    table: RowTable, settings: FeedSettings, train: TrainOptions, *, rows: int, held_out: int
) -> Workload:
    """The training on `rows` rows, of which the table holds all or the first."""
    steps = steps_in(settings.epochs, num_steps(rows, settings.batch_size))
    steps = min(steps, train.max_steps) if train.max_steps else steps
    one_pass = whole_pass(table, settings, epoch=0)
    plans = list(islice(one_pass.plans(0, min(one_pass.num_steps, SAMPLED_STEPS)), SAMPLED_STEPS))
    own = [table.sizes.tokens(plan.rows) for plan in plans]
    loads = [_loads(plan.own, sizes, settings) for plan, sizes in zip(plans, own, strict=True)]
    seen = sum(len(plan.rows) for plan in plans)
    share = rows_seen(steps, rows, settings.batch_size) / seen
    return Workload(
        rows=rows,
        held_out=held_out,
        epochs=settings.epochs,
        steps=steps,
        batch_size=settings.batch_size,
        learned_tokens=_scaled([int(sizes.sum()) for sizes in own], share),
        mismatched_tokens=_scaled([_mismatched(one_pass, plan) for plan in plans], share),
        micro_batches=max(plan.own.num_turns for plan in plans),
        micro_tokens=max(int(load.max()) for load in loads),
        row=_mean_row(table),
    )


def _loads(
    assignment: BatchAssignment, lengths: NDArray[np.int64], settings: FeedSettings
) -> NDArray[np.int64]:
    """Tokens of each micro-batch."""
    bins = assignment.ranks * assignment.num_turns + assignment.turns
    loads = np.zeros(bins.max() + 1, dtype=np.int64)
    if settings.pads:
        np.maximum.at(loads, bins, lengths)
        return loads * np.bincount(bins, minlength=len(loads))
    np.add.at(loads, bins, lengths)
    return loads


def _mismatched(one_pass: Pass, plan: StepPlan) -> int:
    sizes, pairs = one_pass.table.sizes, plan.pairs
    if not len(pairs):
        return 0
    prompts = sizes.prompt_tokens[plan.rows[plan.paired_rows]].sum(dtype=np.int64)
    return int(prompts + pairs.tokens(sizes, plan.rows).sum(dtype=np.int64))


def _scaled(tokens: Sequence[int], share: float) -> int:
    """The sum over all rows, scaled up from the sampled ones."""
    return round(sum(tokens) * share)


def _mean_row(table: RowTable) -> RowShape:
    count = max(1, round(len(table.sizes.mismatched_tokens) / len(table)))
    whole = max(count, round(float(table.sizes.own_tokens.mean())))
    sizes = tuple(len(part) for part in np.array_split(np.arange(whole), count))
    return RowShape(max(1, round(float(table.sizes.prompt_tokens.mean()))), sizes)
