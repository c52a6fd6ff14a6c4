"""The policy of stage 2: the model that is trained, scored as stage 1 scores the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...schemas.batches import Partitions, SequenceGroup
from ...schemas.config import LoraOptions, ModelOptions, TrainOptions
from ...schemas.errors import UsageError
from ...schemas.methods import Head
from ...schemas.rows import Tree
from .fused_head import output_head
from .fused_head_backward import call_head_for_logps
from .load import add_lora, first_line, load_model, merged, value_head
from .logprobs import ScoringPath, branch_outputs, causal_model, choose_path, input_device
from .reward_model import choose_layout, load_reward_model, tree_scores
from .sharded_load import load_sharded
from .shared_sequence import agreed
from .transformers_compat import recompute_activations
from .tree_attention import single_branches, tree_batch

_ONE_TOKEN = np.zeros(1, np.int32)
# What a rank with nothing to do runs, because under ZeRO-3 its peers wait for its collectives.
NOTHING = Tree(_ONE_TOKEN, (_ONE_TOKEN,))


@dataclass(frozen=True)
class Sharding:
    """How a policy's parameters, as they are created, and its sequences are spread over ranks."""

    partitions: Partitions | None = None  # None: every rank has all parameters
    path: ScoringPath | None = None  # of the checkpoint that is about to replace the parameters
    group: SequenceGroup | None = None  # of the ranks that share every sequence


WHOLE = Sharding()


def load_policy(
    model: ModelOptions,
    train: TrainOptions,
    lora: LoraOptions,
    *,
    head: Head = "none",
    purity: bool = False,
    spread: Sharding = WHOLE,
) -> Policy:
    """The policy that begins as this model, the adapter of a reference merged into it."""
    options = replace(model, dtype=train.dtype, device_map="", tensor_parallel=1)
    load: Callable[..., nn.Module] = load_model
    if spread.partitions:
        reads = lora.enabled or spread.path is None  # a checkpoint leaves frozen weights out
        load = partial(load_sharded, partitions=spread.partitions, reads=reads)
    if head == "score":
        loaded = load_reward_model(options, train.seed, load)
    else:
        loaded = merged(load(options))
    loaded.requires_grad_(True)
    if not train.dropout:
        turn_dropout_off(loaded)
    if lora.enabled:
        loaded = add_lora(loaded, lora if train.dropout else replace(lora, dropout=0.0), train.seed)
    policy = Policy(loaded, head=head, purity=purity, spread=spread)
    if train.gradient_checkpointing:
        policy.recompute_activations()
    return policy


class Policy(nn.Module):
    """A language model, with or without an adapter, that returns log-probs or scores."""

    def __init__(
        self,
        model: nn.Module,
        *,
        head: Head = "none",
        purity: bool = False,
        spread: Sharding = WHOLE,
    ) -> None:
        super().__init__()
        self.model = model
        # Asked once: after ZeRO-3 has partitioned the weights, a look at one would gather it.
        self.device = input_device(model)
        choose = choose_layout if head == "score" else choose_path
        partitions, group = spread.partitions, spread.group
        if partitions and head != "score" and output_head(causal_model(model)):
            call_head_for_logps(causal_model(model))  # for the probe: it is whole in its calls only
        with torch.no_grad(), partitions.in_calls(model) if partitions else nullcontext():
            agree = partitions.agreed if partitions else agreed if group else bool
            known = replace(spread.path, group=group) if spread.path else None
            self.path: ScoringPath = known or choose(model.eval(), agree, group)
        if self.path.head == "fused":
            call_head_for_logps(causal_model(model))
        # Not part of the model, so that its saved weights and adapters leave it out.
        self.value_head = value_head(causal_model(model)) if head == "values" else None
        wanted = {"logps": True, "purity": purity, "values": head == "values"}
        self.output_names = tuple(name for name, is_asked in wanted.items() if is_asked)
        self.train()

    def forward(self, trees: Sequence[Tree]) -> Tensor:
        """A row for each name in `output_names`, with a number for every completion token: float32.

        Scores are numbers of branches. One pass of the model however many trees there are, none
        included: ranks then make the same collectives. Auxiliary losses of mixtures of experts are
        left out.
        """
        rows = trees or (NOTHING,)
        if self.path.head == "score":
            outputs = tree_scores(self.model, rows, self.path)[None]
        else:
            outputs = self._of_tokens(rows)
        return outputs if trees else outputs[:, :0]

    def _of_tokens(self, trees: Sequence[Tree]) -> Tensor:
        rows = single_branches(trees) if self.path.layout == "plain" else trees
        batch = tree_batch(rows, self.device, packed=self.path.layout == "packed")
        purity, head = "purity" in self.output_names, self.value_head
        outputs = branch_outputs(
            self.model, batch, self.path, purity=purity, states=head is not None
        )
        if head is None:
            return outputs.whole(outputs.rows)
        values = head(outputs.states).t().to(outputs.rows.device)
        return outputs.whole(torch.cat([outputs.rows, values]))

    def recompute_activations(self) -> None:
        """Keeps what enters a layer only, and runs the layer again for its gradient."""
        try:
            recompute_activations(causal_model(self.model))
        except ValueError as error:
            raise UsageError(
                f"train.gradient_checkpointing: {first_line(error)} Set it to false."
            ) from error


DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
RANDOM = ("drop", "jitter")  # as in attention_dropout, resid_pdrop, layerdrop, router_jitter_noise


def turn_dropout_off(model: nn.Module) -> None:
    """Sets every probability to zero, where modules keep it and where they may read it."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        _set_to_zero(module)
        if (config := getattr(module, "config", None)) is not None:
            _set_to_zero(config)


def _set_to_zero(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(owner, name, 0.0)
