"""The policy of stage 2: the one model that is trained, asked as stage 1 asks the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .adapter import add_lora, merged
from .dropout import turn_dropout_off
from .head import call_head_for_logps
from .load import first_line, load_model
from .logps import ScoringPath, branch_logps, causal_model, input_device
from .probe import choose_path
from .trees import single_branches, tree_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...schemas.config import LoraOptions, ModelOptions, TrainOptions

_ONE_TOKEN = np.zeros(1, np.int32)
# What a rank with nothing to do runs, because under ZeRO-3 its peers wait for its collectives.
NOTHING = Tree(_ONE_TOKEN, (_ONE_TOKEN,))


def load_policy(model: ModelOptions, train: TrainOptions, lora: LoraOptions) -> Policy:
    """The policy of `train.model`, or the reference itself: its adapter, if any, merged into it."""
    options = replace(model, dtype=train.dtype, device_map="")
    if train.model:
        options = replace(options, path=train.model, adapter="")
    loaded = load_model(options)
    if options.adapter:
        loaded = merged(loaded)
    loaded.requires_grad_(True)
    if not train.dropout:
        turn_dropout_off(loaded)
    if lora.enabled:
        loaded = add_lora(loaded, lora if train.dropout else replace(lora, dropout=0.0), train.seed)
    policy = Policy(loaded)
    if train.gradient_checkpointing:
        policy.recompute_activations()
    return policy


class Policy(nn.Module):
    """A causal language model, with or without an adapter, that answers with log-probs."""

    tells = ("logps",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Asked once: after ZeRO-3 has partitioned the weights, a look at one would gather it.
        self.device = input_device(model)
        with torch.no_grad():
            self.path: ScoringPath = choose_path(model.eval())
        if self.path.head == "fused":
            call_head_for_logps(causal_model(model))
        self.train()

    def forward(self, trees: Sequence[Tree]) -> Tensor:
        """A row for each name in `tells`, with a number for every completion token: float32.

        One pass of the model however many trees there are, none included: ranks then make the same
        collectives. Auxiliary losses of mixtures of experts are left out.
        """
        rows = trees or (NOTHING,)
        if self.path.layout == "plain":
            rows = single_branches(rows)
        batch = tree_batch(rows, self.device, packed=self.path.layout == "packed")
        logps = branch_logps(self.model, batch, self.path)
        return (logps if trees else logps[:0])[None]

    def recompute_activations(self) -> None:
        """Keeps what enters a layer only, and runs the layer again for its gradient."""
        inner: Any = causal_model(self.model)
        # Its name has changed within the versions of transformers we take.
        enable = getattr(inner, "activation_checkpointing_enable", None)
        try:
            (enable or inner.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            raise UsageError(
                f"train.gradient_checkpointing: {first_line(error)} Set it to false."
            ) from error

    def trainable_names(self) -> tuple[str, ...]:
        """The parameters that learn, as the model names them."""
        named = self.model.named_parameters()
        return tuple(name for name, parameter in named if parameter.requires_grad)
