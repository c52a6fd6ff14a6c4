"""Heads that give a number and not a word: of values, and of models that score texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor, nn
from torch.nn.functional import linear

from ....schemas.config import ModelOptions
from .library_errors import refused_as

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


def stored_value_head(model: ModelOptions) -> Path | None:
    """The file of the value head that was trained with a model, or with its adapter, if any."""
    folders = [folder for folder in (model.adapter, model.path) if folder]
    files = [Path(folder) / f"{VALUE_HEAD}.safetensors" for folder in folders]
    return next((file for file in files if file.is_file()), None)


def read_value_head(head: ScalarHead, file: Path) -> None:
    """Sets the head's weights to those of a file, whatever their dtype."""
    remedy = "Move the file away to begin with a new head."
    with refused_as(f"{file}: no value head of this model", remedy):
        weights = load(file.read_bytes())
        head.load_state_dict(weights)
        if odd := sorted(name for name, one in weights.items() if not one.isfinite().all()):
            raise ValueError(f"{odd[0]} has values that are NaN or infinite")


def value_head(model: Any) -> ScalarHead:
    """A head that gives a value for each last hidden state, in the model's dtype.

    It begins as zero: random values would be no better, every rank has the same, and the
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
