"""Heads that give a number and not a word: of values, and of models that score texts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

VALUE_HEAD = "value_head"  # what the policy calls it, and the file it is saved in
SCORES = "ForSequenceClassification"  # how transformers names models that score texts


class ScalarHead(nn.Linear):
    """A projection to one number, computed in float32 for weights of any dtype.

    It has to be called: ZeRO-3 gathers a module's weight around its call and nowhere else.
    """

    def forward(self, states: Tensor) -> Tensor:
        """The projection of `states` (..., hidden): (..., 1) float32."""
        bias = None if self.bias is None else self.bias.float()
        return linear(states.float(), self.weight.float(), bias)


def is_reward_model(model: Any) -> bool:
    """Whether a transformers model scores texts."""
    return type(model).__name__.endswith(SCORES)


def value_head(model: Any) -> ScalarHead:
    """A head that gives a value for each last hidden state, in the model's dtype.

    It is initialized to zero: random values would be no better, every rank has the same, and the
    first steps do not change the policy's states.
    """
    output = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    width = output.in_features if isinstance(output, nn.Linear) else config.hidden_size
    device = model.get_input_embeddings().weight.device
    head = ScalarHead(width, 1, device=device, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
