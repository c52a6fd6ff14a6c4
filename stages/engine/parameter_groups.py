"""Parameter groups of an optimizer: with and without weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .deepspeed_compat import whole_ndim


def parameter_groups(
    policy: nn.Module, learning: list[nn.Parameter], config: Mapping[str, Any]
) -> list[Any]:
    """The optimizer's groups: matrices have weight decay; biases and norms have none."""
    decay = config.get("optimizer", {}).get("params", {}).get("weight_decay")
    if not decay:
        return learning
    biases = {one for name, one in policy.named_parameters() if name.endswith("bias")}
    vectors = [one for one in learning if whole_ndim(one) < 2 or one in biases]
    others = set(vectors)
    matrices = [one for one in learning if one not in others]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
