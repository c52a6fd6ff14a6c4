"""The one function both stages call: log-probabilities of the branches of a batch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from .head import LogpHead, fused_logps, output_head
from .masks import tree_mask
from .pieces import PIECES, pieces_of
from .trees import PAD, groups_within, padded_length, single_branches, tree_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ...schemas.rows import Tree
    from .trees import TreeBatch

CPU_TOKENS = 2048  # larger forward passes leave the caches: more memory, and no faster
EXACT_ELEMENTS = 1 << 26  # logits held at once by the exact head, unless one tree needs more


@dataclass(frozen=True)
class ScoringPath:
    """How a model is scored, and how far that is from its own logits."""

    layout: Literal["packed", "tree", "plain"]
    head: Literal["fused", "exact"]
    worst_difference: float  # as the probe measures it for the dtype


def branch_logps(model: nn.Module, batch: TreeBatch, path: ScoringPath) -> Tensor:
    """Log p of every completion token of a batch: (T,) float32."""
    inner: Any = causal_model(model)
    _use_attention(inner, path)
    inputs = _inputs(inner, batch, path)
    if path.head == "exact":
        logits = inner(**inputs).logits
        return _exact_logps(logits.flatten(0, 1), batch)
    hidden = inner.base_model(**inputs).last_hidden_state
    return _head_logps(inner, hidden.flatten(0, 1)[batch.predictors], batch.targets)


def tree_logps(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> Tensor:
    """Log p of every completion token, in pieces where the path needs them: (T,) float32."""
    device = input_device(model)
    max_tokens = len(trees) * padded_length(trees)
    if device.type == "cpu":
        max_tokens = min(max_tokens, CPU_TOKENS)
    if path.head == "exact":
        vocabulary = causal_model(model).config.get_text_config(decoder=True).vocab_size
        max_tokens = min(max_tokens, EXACT_ELEMENTS // vocabulary)
    rows = single_branches(trees) if path.layout == "plain" else trees
    packed = path.layout == "packed"
    groups = groups_within(rows, max_tokens, packed=packed)
    batches = (tree_batch(group, device, packed=packed) for group in groups)
    return torch.cat([branch_logps(model, batch, path) for batch in batches])


def causal_model(model: Any) -> Any:
    """The transformers model, which PEFT may have wrapped (its layers stay adapted)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go."""
    device: torch.device = causal_model(model).get_input_embeddings().weight.device
    return device


def _use_attention(model: Any, path: ScoringPath) -> None:
    """Packed batches have an attention of their own, in place of sdpa."""
    packed, active = path.layout == "packed", model.config._attn_implementation
    if packed != (active == PIECES):
        model.set_attn_implementation(PIECES if packed else "sdpa")


def _inputs(model: Any, batch: TreeBatch, path: ScoringPath) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": batch.token_ids}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    config = model.config.get_text_config(decoder=True)
    if path.layout != "plain":
        inputs["position_ids"] = batch.positions
    if path.layout == "packed":
        inputs["pieces"] = pieces_of(batch, config, model.dtype)
    elif path.layout == "tree":
        inputs["attention_mask"] = tree_mask(batch, config, model.dtype)
    elif (batch.segments == PAD).any():
        inputs["attention_mask"] = (batch.segments != PAD).long()
    return inputs


def _head_logps(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    layer = model.get_output_embeddings()
    if isinstance(layer, LogpHead):
        logps: Tensor = layer(states, targets)
        return logps
    head = output_head(model)
    assert head is not None, "the probe refuses a fused head where there is none"
    device = head.weight.device
    return fused_logps(states.to(device), head.weight, head.bias, targets.to(device), head.spec)


def _exact_logps(logits: Tensor, batch: TreeBatch) -> Tensor:
    """float32 log-softmax of the model's own logits (trees * length, vocabulary)."""
    pieces = []
    rows = max(1, EXACT_ELEMENTS // 4 // logits.shape[-1])
    targets = torch.split(batch.targets.to(logits.device), rows)
    for predictors, wanted in zip(torch.split(batch.predictors, rows), targets, strict=True):
        logps = torch.log_softmax(logits[predictors.to(logits.device)].float(), dim=-1)
        pieces.append(logps.gather(1, wanted[:, None]).squeeze(1))
    return torch.cat(pieces)
