"""Parameter groups of an optimizer: with and without weight decay, and Muon's matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .deepspeed_compat import whole_ndim
from .optimizers import kind_of


def parameter_groups(
    policy: nn.Module, learning: list[nn.Parameter], config: Mapping[str, Any]
) -> list[Any]:
    """The optimizer's groups: matrices have weight decay; biases and norms have none."""
    decay = config.get("optimizer", {}).get("params", {}).get("weight_decay")
    kind = kind_of(config)
    is_for_matrices = kind is not None and kind.is_for_matrices
    if not decay and not is_for_matrices:
        return learning
    inner = _inner_matrices(policy) if is_for_matrices else set[nn.Parameter]()
    biases = {one for name, one in policy.named_parameters() if name.endswith("bias")}
    vectors = [one for one in learning if whole_ndim(one) < 2 or one in biases]
    others = inner.union(vectors)
    matrices = [one for one in learning if one not in others]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in learning if one in inner], "orthogonal": True},
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _inner_matrices(policy: nn.Module) -> set[nn.Parameter]:
    """All matrices except embeddings, the output layer, heads with one output, experts' biases."""
    outer = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    for module in policy.modules():
        output = getattr(module, "get_output_embeddings", lambda: None)()
        outer.add(id(getattr(output, "weight", None)))
    matrices = (
        one
        for name, one in policy.named_parameters()
        if one.ndim >= 2 and min(one.shape[-2:]) > 1 and not name.endswith("bias")
    )
    return {one for one in matrices if id(one) not in outer}
