"""The memory that stage 1 needs on one GPU: the reference's weights and its largest batch.

Worked out from the settings, the reference's config.json and the lengths of the rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...schemas.config import ModelOptions
from ...schemas.rows import Tree
from ...stages.engine.engine_memory import CUBLAS
from ...stages.feed.cache_index import RowSizes
from ...stages.model.loading.load import empty_model
from ...stages.model.loading.model_folder import require_adapter
from ...stages.model.loading.quiet import quiet
from ...stages.model.logprobs import ScoringPath, passes
from ...stages.model.memory.memory_trace import scoring_trace
from ...stages.score.batch_plan import TreeCost, plan_batches, plan_trees
from .memory_plan import hidden_size


@dataclass(frozen=True)
class ScoringMemory:
    """Bytes on one GPU, or on the CPU."""

    tokens_per_batch: int  # at most
    batch_tokens: int  # of the largest batch
    pass_tokens: int  # those of it that are run at once
    weights: int
    activations: int  # of the layers
    head: int  # once the layers are done, with the states that it reads
    buffers: int

    @property
    def peak(self) -> int:
        """The most at once."""
        return self.weights + max(self.activations, self.head) + self.buffers


@dataclass(frozen=True)
class ScoringSettings:
    """The settings of stage 1 that decide how much memory it takes."""

    reference: ModelOptions
    dtype: str
    device: str
    num_pairs: int  # mismatched completions of each completion
    tokens_per_batch: int
    rows_per_shard: int


@dataclass(frozen=True)
class Scoring:
    """Stage 1 over the rows of a plan; no weight is read."""

    own: int  # tokens of prompts and completions
    mismatched: int  # tokens of mismatched completions
    sizes: RowSizes
    settings: ScoringSettings

    @property
    def is_known(self) -> bool:
        """Whether the reference is here."""
        reference = self.settings.reference
        return all(Path(one).is_dir() for one in (reference.path, reference.adapter) if one)

    @cached_property
    def memory(self) -> ScoringMemory:
        """The memory with the batches of the settings."""
        return self.memory_with(self.settings.tokens_per_batch)

    def fitting(self, usable: int) -> ScoringMemory:
        """The memory once batches are halved until they fit, or one sequence is all of a batch.

        Stage 1 halves them so itself where memory runs out.
        """
        found, budget = self.memory, self.settings.tokens_per_batch
        while found.peak > usable and found.batch_tokens > self._rows.longest:
            budget = max(budget // 2, 1)
            found = self.memory_with(budget)
        return found

    def memory_with(self, tokens_per_batch: int) -> ScoringMemory:
        """The memory with batches of so many tokens."""
        settings, model = self.settings, self._model
        cost = TreeCost(hidden_size(model), tokens_per_batch)
        path = ScoringPath("flex" if settings.device == "cuda" else "packed", "fused", 0.0)
        batch = self._rows.largest_batch(cost)
        largest = max(passes(model, batch, path, settings.device), key=_tokens)
        layers, head = scoring_trace(model, largest, path, device=settings.device)
        return ScoringMemory(
            tokens_per_batch=tokens_per_batch,
            batch_tokens=_tokens(batch),
            pass_tokens=_tokens(largest),
            weights=sum(one.nbytes for one in chain(model.parameters(), model.buffers())),
            activations=layers,
            head=head,
            buffers=CUBLAS if settings.device == "cuda" else 0,
        )

    @cached_property
    def _rows(self) -> _ShardRows:
        return _ShardRows.of(self.sizes, self.settings)

    @cached_property
    def _model(self) -> nn.Module:
        """The reference on the meta device, with its adapter."""
        options = self.settings.reference
        model = empty_model(options, self.settings.dtype)
        if not options.adapter:
            return model
        require_adapter(options.adapter)
        from peft import PeftConfig, get_peft_model  # noqa: PLC0415 - optional, and slow to import

        with quiet(), torch.device("meta"):
            kind = PeftConfig.from_pretrained(options.adapter, local_files_only=True)
            adapted: nn.Module = get_peft_model(model, kind)
        return adapted


@dataclass(frozen=True)
class _ShardRows:
    """The longest rows of one shard; the completions of a row have their mean length."""

    prompts: NDArray[np.int64]  # (rows,) tokens
    branches: NDArray[np.int64]  # (rows, branches) tokens; own completions and mismatched ones

    @staticmethod
    def of(sizes: RowSizes, settings: ScoringSettings) -> _ShardRows:
        order = np.argsort(-sizes.tokens(np.arange(len(sizes))), kind="stable")
        rows = order[: settings.rows_per_shard]
        own = max(1, round(len(sizes.mismatched_tokens) / len(sizes)))
        each = -(-sizes.own_tokens[rows].astype(np.int64) // own)
        count = own * (1 + settings.num_pairs)
        prompts = sizes.prompt_tokens[rows].astype(np.int64)
        return _ShardRows(prompts, np.repeat(each[:, None], count, axis=1))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with one completion."""
        return int((self.prompts + self.branches[:, 0]).max())

    def largest_batch(self, cost: TreeCost) -> list[Tree]:
        """The batch of the most tokens, as stage 1 makes batches of these rows."""
        lengths, (rows, count) = self.branches.ravel(), self.branches.shape
        plans = plan_trees(
            [(row,) for row in range(rows)],
            [range(row * count, (row + 1) * count) for row in range(rows)],
            prompt_lengths=self.prompts,
            branch_lengths=lengths,
            cost=cost,
        )
        sizes = [plan.length for plan in plans]
        batches = plan_batches(sizes, cost.tokens_per_batch, pads=False)
        largest = max(batches, key=lambda batch: sum(sizes[index] for index in batch))
        blank = np.zeros(max(sizes), np.int32)
        return [
            Tree(
                blank[: self.prompts[plan.row]],
                tuple(blank[: lengths[branch]] for branch in plan.branches),
            )
            for plan in (plans[index] for index in largest)
        ]


def _tokens(trees: Sequence[Tree]) -> int:
    return sum(tree.num_tokens for tree in trees)
