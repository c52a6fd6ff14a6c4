"""The workload of a training: steps, tokens and micro-batches, from the lengths of its rows.

They are planned in the same way as by the feed; the rows are a cache's, or only given by number. A
training prints a short plan of the policy that it loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.batches import World
from ...schemas.cache import Manifest
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError, counted
from ...schemas.rows import Tree
from ...schemas.train_options import TrainOptions
from ...stages.engine.deepspeed_compat import whole_numel
from ...stages.engine.deepspeed_config import stage_of
from ...stages.engine.engine_memory import Elements, elements_of, engine_memory
from ...stages.feed.cache_index import RowSizes, RowTable, ShardColumns, unchecked
from ...stages.feed.loader import CacheFeed
from ...stages.feed.step_plan import (
    FeedSettings,
    num_steps,
    rows_seen,
    steps_in,
    training_pass,
)
from ...stages.feed.train_source import held_out_sources, open_source
from ...stages.methods.objective import Objective
from ...stages.model.load import DTYPES
from ...stages.model.logprobs import causal_model
from ...stages.model.model_folder import model_config, stored_dtype, text_settings
from ...stages.model.policy import Policy
from ..jobs.object_inputs import cache_at, local_model
from .cache_checks import held_out_caches, read_spec_of

SAMPLED_STEPS = 32  # of the first epoch
MOST_MADE_ROWS = 100_000
# A GPU needs large products. On a CPU, larger micro-batches are not faster and take more memory.
_ON_GPU, _ON_CPU = 16_384, 2048


def planned_tokens(train: TrainOptions, device: str) -> int:
    """The planned tokens of a micro-batch."""
    return train.tokens_per_batch or (_ON_CPU if device == "cpu" else _ON_GPU)


def feed_settings(
    train: TrainOptions, objective: Objective, world: World, *, tokens: int, pads: bool
) -> FeedSettings:
    """The settings of batching: steps, and micro-batches of at most so many tokens."""
    return FeedSettings(
        seed=train.seed,
        epochs=train.epochs,
        batch_size=train.batch_size,
        kl_use=objective.option("kl_use", "rotate"),
        kl_per_step=objective.option("kl_per_step", 0),
        limit_eval_batches=train.limit_eval_batches,
        tokens_per_batch=tokens,
        pads=pads,
        world=world,
    )


@dataclass(frozen=True)
class RowShape:
    """A prompt and its completions, in tokens."""

    prompt: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and all completions."""
        return self.prompt + sum(self.completions)

    @staticmethod
    def mean(table: RowTable) -> RowShape:
        """A row with the mean lengths of a table."""
        count = max(1, round(len(table.sizes.mismatched_tokens) / len(table)))
        tokens = max(count, round(float(table.sizes.own_tokens.mean())))
        sizes = tuple(len(part) for part in np.array_split(np.arange(tokens), count))
        return RowShape(max(1, round(float(table.sizes.prompt_tokens.mean()))), sizes)

    def rows(self, tokens: int) -> list[Tree]:
        """Rows of about so many tokens in total, at least one."""
        blank = [np.zeros(size, np.int32) for size in (self.prompt, *self.completions)]
        return [Tree(blank[0], tuple(blank[1:]))] * max(1, round(tokens / self.tokens))


@dataclass(frozen=True)
class Workload:
    """The work of a training over all ranks."""

    rows: int  # to learn from
    held_out: int
    epochs: float
    steps: int
    batch_size: int
    learned_tokens: int
    mismatched_tokens: int  # run without gradients, for KTO's KL term
    micro_batches: int  # of each rank in a step, without those for KL completions
    micro_tokens: int  # of the largest one, with padding
    predicted: float  # share of completion tokens in the largest one
    row: RowShape  # with the mean lengths


def workload_of(
    table: RowTable, settings: FeedSettings, train: TrainOptions, *, rows: int, held_out: int
) -> Workload:
    """The work of a training on `rows` rows; the table has all of them, or the first ones."""
    epochs, per_epoch = settings.epochs, num_steps(rows, settings.batch_size)
    steps = steps_in(epochs, per_epoch)
    if 0 < train.max_steps < steps:
        steps = train.max_steps
        epochs = float(f"{steps / per_epoch:.3g}")
    one_pass = training_pass(table, settings, epoch=0)
    sampled = min(one_pass.num_steps, SAMPLED_STEPS)
    learned = mismatched = seen = turns = largest = 0
    for plan in islice(one_pass.plans(0, sampled), sampled):
        lengths = table.sizes.tokens(plan.rows)
        learned += int(lengths.sum())
        seen += len(plan.rows)
        turns = max(turns, plan.own.num_turns)
        of = plan.own.ranks * plan.own.num_turns + plan.own.turns  # the micro-batch of each row
        loads = np.zeros(of.max() + 1, np.int64)
        if settings.pads:
            np.maximum.at(loads, of, lengths)
            loads *= np.bincount(of)
        else:
            np.add.at(loads, of, lengths)
        largest = max(largest, int(loads.max()))
        if len(plan.pairs):
            prompts = table.sizes.prompt_tokens[plan.rows[plan.paired_rows]]
            mismatched += int(prompts.sum(dtype=np.int64))
            mismatched += int(plan.pairs.tokens(table.sizes, plan.rows).sum(dtype=np.int64))
    share = rows_seen(steps, rows, settings.batch_size) / seen
    row = RowShape.mean(table)
    return Workload(
        rows=rows,
        held_out=held_out,
        epochs=epochs,
        steps=steps,
        batch_size=settings.batch_size,
        learned_tokens=round(learned * share),
        mismatched_tokens=round(mismatched * share),
        micro_batches=turns,
        micro_tokens=largest,
        predicted=1 - row.prompt / row.tokens,
        row=row,
    )


@dataclass(frozen=True)
class GivenRows:
    """Rows that do not exist yet: pairs of one prompt and two completions."""

    count: int
    prompt: int
    completion: int


@dataclass(frozen=True)
class PlannedRows:
    """The rows to learn from, the policy, and the tokens that stage 1 scores."""

    table: RowTable
    count: int
    held_out: int
    policy: ModelOptions
    own_tokens: int  # of prompts and completions
    mismatched_tokens: int  # of KL completions
    manifest: Manifest | None = None  # of the cache; None: the rows do not exist yet


def planned_rows(config: Config, objective: Objective, given: GivenRows | None) -> PlannedRows:
    """The given rows, or those of the cache."""
    if given and config.train.cache:
        raise UsageError("--rows is for rows that do not exist yet. Leave out --cache or --rows.")
    if given:
        return _given_rows(config, objective, given)
    cache = cache_at(config.train.cache or config.cache.output)
    if not cache.manifest_file.exists():
        raise UsageError(
            f"{cache} is no finished cache. Name one with --cache, or plan without one: --rows N "
            "takes N pairs."
        )
    manifest = cache.manifest()
    path = local_model(config.train.model or manifest.model)
    adapter = "" if config.train.model else local_model(manifest.adapter)
    read_spec = read_spec_of(objective, config.train, path)
    source = open_source(cache, manifest, read_spec, ShardColumns(unchecked))
    held_out = held_out_sources(source, held_out_caches(config.train))
    sizes = [table.sizes for table in (source.train, source.held_out)]
    prompts = sum(int(one.prompt_tokens.sum(dtype="int64")) for one in sizes)
    completions = sum(int(one.own_tokens.sum(dtype="int64")) for one in sizes)
    return PlannedRows(
        table=source.train,
        count=source.train.rows_per_epoch,
        held_out=sum(one.eval_rows for one in held_out.values()),
        policy=replace(config.model, path=path, adapter=adapter, device_map=""),
        own_tokens=prompts + completions,
        mismatched_tokens=source.num_partners * completions,
        manifest=manifest,
    )


def _given_rows(config: Config, objective: Objective, rows: GivenRows) -> PlannedRows:
    path = config.train.model or config.model.path
    if not path:
        raise UsageError("No policy. Pass --model DIR: a folder with its config.json is enough.")
    adapter = "" if config.train.model else local_model(config.model.adapter)
    completions = (rows.completion,) * (1 if objective.rows == "imitated" else 2)
    learned = round(rows.count * (1 - config.train.eval_fraction))
    partners = max(1, config.cache.kl_pairs) if "mismatched" in objective.needs else 0
    made = max(1, min(learned, MOST_MADE_ROWS))
    return PlannedRows(
        table=even_rows(made, RowShape(rows.prompt, completions), num_partners=partners),
        count=max(1, learned),
        held_out=rows.count - learned,
        policy=replace(config.model, path=local_model(path), adapter=adapter, device_map=""),
        # Stage 1 stores both completions for any method.
        own_tokens=rows.count * (rows.prompt + 2 * rows.completion),
        mismatched_tokens=rows.count * 2 * rows.completion * config.cache.kl_pairs,
    )


def even_rows(count: int, shape: RowShape, *, num_partners: int) -> RowTable:
    """Rows of one shape, each completion with `num_partners` KL completions of its length."""
    lengths = np.tile(np.array(shape.completions, np.int32), count)
    own = np.full(count, sum(shape.completions), np.int32)
    sizes = RowSizes(
        index_in_group=np.arange(count, dtype=np.int32),
        prompt_tokens=np.full(count, shape.prompt, np.int32),
        own_tokens=own,
        learned_tokens=own,
        chosen_tokens=np.full(count, shape.completions[0], np.int32),
        completion_offsets=np.arange(count + 1) * len(shape.completions),
        mismatched_tokens=np.repeat(lengths[:, None], num_partners, axis=1),
    )
    return RowTable(np.array([0, count]), sizes)


def known_dtype(folder: str, asked: str) -> str:
    """The dtype of the settings, else of the weights, else of config.json."""
    if asked != "auto":
        return asked
    if any(Path(folder).glob("*.safetensors")):
        return stored_dtype(folder)
    config = text_settings(model_config(folder))
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    if dtype not in DTYPES:
        raise UsageError(
            f"{folder}: neither weights nor config.json have a dtype. Pass --dtype bfloat16."
        )
    return dtype


def short_plan(
    feed: CacheFeed, policy: Policy, train: TrainOptions, engine_config: dict[str, Any]
) -> list[str]:
    """Two lines: the work of the run, and the memory of each rank."""
    source, ranks = feed.source, feed.settings.world.size
    rows, held_out = source.train.rows_per_epoch, feed.eval_rows
    work = workload_of(source.train, feed.settings, train, rows=rows, held_out=held_out)
    dtype, device = causal_model(policy.model).dtype, policy.device.type
    elements = elements_of(policy, whole_numel)
    engine = engine_memory(
        elements, engine_config, train, ranks=ranks, itemsize=dtype.itemsize, device=device
    )
    sizes = f"{gib(engine.weights)} GiB of weights, {gib(engine.gradients)} of gradients and "
    name = str(dtype).removeprefix("torch.")
    return [
        f"plan: {steps_text(work)}, {tokens_text(work)}; a step is {micro_batches_text(work)}",
        f"plan: {parameters_text(elements)}, {name}, zero{stage_of(engine_config)}, "
        f"{counted(ranks, 'ranks')}; each holds {sizes}{gib(engine.optimizer)} of the optimizer, "
        "beside activations",
    ]


def parameters_text(elements: Elements) -> str:
    """The number of parameters, and of trainable ones."""
    share = elements.trained / elements.total
    learn = "all learn" if not elements.frozen else f"{elements.trained:,} learn ({share:.2%})"
    return f"{elements.total:,} parameters, {learn}"


def steps_text(work: Workload) -> str:
    """The numbers of steps, rows and epochs."""
    epochs = f"{work.epochs:,.15g} {'epoch' if work.epochs == 1 else 'epochs'}"
    return f"{counted(work.steps, 'steps')} of {work.batch_size:,} rows, {epochs}"


def tokens_text(work: Workload) -> str:
    """The tokens that the policy runs."""
    if not work.mismatched_tokens:
        return f"{work.learned_tokens:,} tokens"
    kl_tokens = f"{work.mismatched_tokens:,} of KL completions"
    return f"{work.learned_tokens:,} tokens to learn from and {kl_tokens}"


def micro_batches_text(work: Workload) -> str:
    """The micro-batches of a step."""
    count = "one micro-batch"
    if work.micro_batches > 1:
        count = f"{work.micro_batches:,} micro-batches"
    return f"{count} on each rank, of at most {work.micro_tokens:,} tokens"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.1f}" if size >= 0.05 * 2**30 or not size else f"{size / 2**30:.2f}"
