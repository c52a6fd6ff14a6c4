"""Heads that give one number for a hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torch import Tensor

VALUE_HEAD = "value_head"  # what the policy calls it, and the file it is saved in
SCORES = "ForSequenceClassification"  # how transformers names models that score texts


class ScalarHead(nn.Linear):
    """A projection to one number, computed in float32 whatever the weights are in.

    It has to be called: ZeRO-3 gathers a module's weight around its call and nowhere else.
    """

    def forward(self, states: Tensor) -> Tensor:
        """(..., 1) float32 of `states` (..., hidden)."""
        bias = None if self.bias is None else self.bias.float()
        return linear(states.float(), self.weight.float(), bias)


def is_reward_model(model: Any) -> bool:
    """Whether a transformers model scores texts."""
    return type(model).__name__.endswith(SCORES)


def value_head(model: Any) -> ScalarHead:
    """A value for each of a causal model's last hidden states, in the model's dtype.

    It begins at zero: no value is better than another one drawn at random, every rank has the same,
    and the first steps do not pull at the policy's states.
    """
    output = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    width = output.in_features if isinstance(output, nn.Linear) else config.hidden_size
    device = model.get_input_embeddings().weight.device
    head = ScalarHead(width, 1, device=device, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
