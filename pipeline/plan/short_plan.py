"""Short form of `align plan`, printed before each run from the loaded policy."""

from __future__ import annotations

from typing import Any

from ...schemas.errors import counted
from ...schemas.train_options import TrainOptions
from ...stages.engine.deepspeed_compat import whole_numel
from ...stages.engine.deepspeed_config import stage_of
from ...stages.engine.engine_memory import engine_memory
from ...stages.feed.loader import CacheFeed
from ...stages.model.logprobs import causal_model
from ...stages.model.policy import Policy
from .memory import elements_of
from .run_plan import gib, micro_batches_text, parameters_text, steps_text, tokens_text
from .workload import workload_of


def short_plan(
    feed: CacheFeed, policy: Policy, train: TrainOptions, engine_config: dict[str, Any]
) -> list[str]:
    """Two lines: what the run goes over, and what each rank holds."""
    held_out = feed.held_out_source.eval_rows
    source, ranks = feed.source, feed.settings.world.size
    work = workload_of(
        source.train, feed.settings, train, rows=source.train.rows_per_epoch, held_out=held_out
    )
    dtype, device = causal_model(policy.model).dtype, policy.device.type
    elements = elements_of(policy, whole_numel)
    engine = engine_memory(
        elements, engine_config, train, ranks=ranks, itemsize=dtype.itemsize, device=device
    )
    sizes = f"{gib(engine.weights)} GiB of weights, {gib(engine.gradients)} of gradients and "
    name = str(dtype).removeprefix("torch.")
    return [
        f"plan: {steps_text(work)}, {tokens_text(work)} tokens; {micro_batches_text(work)}",
        f"plan: {parameters_text(elements)}, {name}, zero{stage_of(engine_config)}, "
        f"{counted(ranks, 'ranks')}; each holds {sizes}{gib(engine.optimizer)} of the optimizer, "
        "beside activations",
    ]
