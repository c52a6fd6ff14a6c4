"""The one pass both stages make: log-probabilities of the branches of a batch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...schemas.errors import UsageError
from .head import LogpHead, fused_rows, output_head
from .masks import tree_mask
from .pieces import PIECES, pieces_of
from .trees import PAD, groups_within, padded_length, single_branches, tree_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ...schemas.rows import Tree
    from .trees import TreeBatch

CPU_TOKENS = 1024  # a pass of twice as many is a tenth faster, for twice the activations
EXACT_ELEMENTS = 1 << 26  # logits held at once by the exact head, unless one tree needs more


@dataclass(frozen=True)
class ScoringPath:
    """How a model is scored, and how far that is from its own logits."""

    layout: Literal["packed", "tree", "plain"]
    head: Literal["fused", "exact", "score"]
    worst_difference: float  # as the probe measures it for the dtype


@dataclass(frozen=True)
class Answers:
    """What one pass of a model gives for every completion token of a batch."""

    rows: Tensor  # (1 or 2, T) float32: log p and, where asked for, purity without a gradient
    states: Tensor  # (T, hidden): the last states, which predict them; (0,) if nobody asks


def branch_logps(model: nn.Module, batch: TreeBatch, path: ScoringPath) -> Tensor:
    """Log p of every completion token of a batch: (T,) float32."""
    return branch_answers(model, batch, path).rows[0]


def branch_answers(
    model: nn.Module,
    batch: TreeBatch,
    path: ScoringPath,
    *,
    purity: bool = False,
    states: bool = False,
) -> Answers:
    """Log p of every completion token of a batch, and what else is asked for."""
    inner: Any = causal_model(model)
    if path.head == "exact":
        inputs = _inputs(inner, batch, path)
        outputs = inner(**inputs, **({"output_hidden_states": True} if states else {}))
        logits = outputs.logits.flatten(0, 1)
        rows = _exact_rows(logits, batch, purity=purity)
        return Answers(rows, _last_states(outputs, batch) if states else rows[0, :0])
    predictors = last_states(inner, batch, path)[batch.predictors]
    return Answers(_head_rows(inner, predictors, batch.targets, purity=purity), predictors)


def last_states(inner: Any, batch: TreeBatch, path: ScoringPath) -> Tensor:
    """What the head is given, of every position: (rows * length, hidden)."""
    hidden: Tensor = inner.base_model(**_inputs(inner, batch, path)).last_hidden_state
    return hidden.flatten(0, 1)


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
    """How the model is told of a batch; it is set to the attention of the path."""
    _use_attention(model, path)
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


def _head_rows(model: Any, states: Tensor, targets: Tensor, *, purity: bool) -> Tensor:
    layer = model.get_output_embeddings()
    if isinstance(layer, LogpHead):
        rows: Tensor = layer(states, targets, purity=purity)
        return rows
    head = output_head(model)
    assert head is not None, "the probe refuses a fused head where there is none"
    device = head.weight.device
    return fused_rows(head, states.to(device), targets.to(device), purity=purity)


def _last_states(outputs: Any, batch: TreeBatch) -> Tensor:
    if not outputs.get("hidden_states"):
        raise UsageError(
            "The model does not give its hidden states, and its logits cannot be had from them by "
            "a plain projection: a value head has nothing to read. Use another model."
        )
    hidden: Tensor = outputs.hidden_states[-1]
    return hidden.flatten(0, 1)[batch.predictors.to(hidden.device)]


def _exact_rows(logits: Tensor, batch: TreeBatch, *, purity: bool) -> Tensor:
    """float32 log-softmax of the model's own logits (trees * length, vocabulary)."""
    pieces = []
    rows = max(1, EXACT_ELEMENTS // 4 // logits.shape[-1])
    targets = torch.split(batch.targets.to(logits.device), rows)
    for predictors, wanted in zip(torch.split(batch.predictors, rows), targets, strict=True):
        logps = torch.log_softmax(logits[predictors.to(logits.device)].float(), dim=-1)
        found = [logps.gather(1, wanted[:, None]).squeeze(1)]
        if purity:
            found.append(torch.logsumexp(2 * logps.detach(), dim=-1))
        pieces.append(torch.stack(found))
    return torch.cat(pieces, dim=1)
