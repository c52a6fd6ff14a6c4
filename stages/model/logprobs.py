"""Computes log-probabilities or scores of the completions of a batch, for both stages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .copies import on_device
from .flex_attention import FLEX, flex_masks, padded_to_blocks
from .fused_head import LogpHead, fused_rows, output_head
from .mixer_rows import rows_for_mixers
from .prompt_once import prompts_once
from .transformers_compat import attention_of, quiet
from .tree_attention import (
    PAD,
    PIECES,
    TreeBatch,
    groups_within,
    pieces_of,
    single_branches,
    tree_batch,
    tree_mask,
)

CPU_TOKENS = 1024  # twice as many are a tenth faster, but need twice the activations
EXACT_ELEMENTS = 1 << 26  # most logits in memory in the exact head, unless a tree has more


@dataclass(frozen=True)
class ScoringPath:
    """The attention layout and the head for scoring a model."""

    layout: Literal["flex", "packed", "tree", "once", "plain"]  # once: without a gradient
    head: Literal["fused", "exact", "score"]

    def __str__(self) -> str:
        """The path in words, for the log."""
        rows = "prompts run once" if self.layout == "once" else f"{self.layout} rows"
        return f"{rows} with the {self.head} head"

    @property
    def packs(self) -> bool:
        """Whether trees are joined end to end; else each is padded to the longest of its batch."""
        return self.layout in {"flex", "packed"}

    def rows(self, trees: Sequence[Tree]) -> Sequence[Tree]:
        """The rows of a batch of trees; the plain layout has one per branch."""
        return single_branches(trees) if self.layout == "plain" else trees

    def batch(self, rows: Sequence[Tree], device: torch.device) -> TreeBatch:
        """Lays rows out on a device."""
        tokens = sum(row.num_tokens for row in rows)
        length = padded_to_blocks(tokens) if self.layout == "flex" else 0
        return tree_batch(rows, device, packed=self.packs, length=length)


class ScalarHead(nn.Linear):
    """A projection to one number, computed in float32 for weights of any dtype.

    It must be called, because ZeRO-3 gathers a module's weight only around its call.
    """

    def forward(self, states: Tensor) -> Tensor:
        """The projection of `states` (..., hidden): (..., 1) float32."""
        bias = None if self.bias is None else self.bias.float()
        return linear(states.float(), self.weight.float(), bias)


def branch_logps(model: nn.Module, batch: TreeBatch, path: ScoringPath) -> Tensor:
    """Log p of every completion token of a batch: (T,) float32."""
    return branch_outputs(model, batch, path)[0][0]


def branch_outputs(
    model: nn.Module,
    batch: TreeBatch,
    path: ScoringPath,
    *,
    collision_logps: bool = False,
    states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs of one pass of a model for every completion token of a batch.

    Rows, (1 or 2, T) float32: log p and, on request, collision log-probs without a gradient. On
    request also the hidden states that predict the tokens: (T, hidden).
    """
    inner: Any = causal_model(model)
    if path.head == "exact":
        inputs = _inputs(inner, batch, path)
        outputs = inner(**inputs, **({"output_hidden_states": True} if states else {}))
        rows = _exact_rows(outputs.logits.flatten(0, 1), batch, collision_logps=collision_logps)
        if not states:
            return rows, rows[0, :0]
        if not outputs.get("hidden_states"):
            raise UsageError(
                "A value head needs hidden states, but this model's head is not a plain projection "
                "of them. Use another model."
            )
        hidden = outputs.hidden_states[-1].flatten(0, 1)
        return rows, hidden[batch.predictors.to(hidden.device)]
    predictors = last_states(inner, batch, path)[batch.predictors]
    return head_rows(inner, predictors, batch.targets, collision_logps=collision_logps), predictors


def last_states(inner: Any, batch: TreeBatch, path: ScoringPath) -> Tensor:
    """The last hidden states: (rows * length, hidden)."""
    hidden: Tensor = inner.base_model(**_inputs(inner, batch, path)).last_hidden_state
    return hidden.flatten(0, 1)


def tree_logps(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> Tensor:
    """Log p of every completion token, in as many passes as the path needs: (T,) float32."""
    device = input_device(model)
    if path.layout == "once":
        return _logps_of_prompts_once(model, trees, path)
    max_tokens = len(trees) * max(tree.num_tokens for tree in trees)
    if device.type == "cpu":
        max_tokens = min(max_tokens, CPU_TOKENS)
    if path.head == "exact":
        vocabulary = causal_model(model).config.get_text_config(decoder=True).vocab_size
        max_tokens = min(max_tokens, EXACT_ELEMENTS // vocabulary)
    groups = groups_within(path.rows(trees), max_tokens, packed=path.packs)
    return torch.cat([branch_logps(model, path.batch(group, device), path) for group in groups])


def _logps_of_prompts_once(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> Tensor:
    inner, device = causal_model(model), input_device(model)
    _use_attention(inner, path)
    tokens = sum(tree.num_tokens for tree in trees)
    at_once = min(tokens, CPU_TOKENS) if device.type == "cpu" else tokens
    branches = [branch for tree in trees for branch in tree.branches]
    found: dict[int, Tensor] = {}
    passes = prompts_once(inner.get_decoder(), trees, device, at_once=at_once, kept=tokens)
    for indices, states in passes:
        targets = np.concatenate([branches[index] for index in indices]).astype(np.int64)
        logps = head_rows(inner, states, on_device(targets, device), collision_logps=False)[0]
        parts = torch.split(logps, [len(branches[index]) for index in indices])
        found.update(zip(indices, parts, strict=True))
    return torch.cat([found[index] for index in range(len(branches))])


def tree_scores(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> Tensor:
    """Scores in the order tree, branch, by one pass of the model: (branches,) float32."""
    rows = path.rows(trees)
    return branch_scores(model, rows, path.batch(rows, input_device(model)), path)


def branch_scores(
    model: nn.Module, rows: Sequence[Tree], batch: TreeBatch, path: ScoringPath
) -> Tensor:
    """Scores of rows that are laid out, in the order row, branch: (branches,) float32."""
    inner: Any = causal_model(model)
    of_text = inner.config.get_text_config(decoder=True)
    positions = _last_positions(rows, batch, of_text.pad_token_id)
    states = last_states(inner, batch, path)
    scores: Tensor = inner.score(states[on_device(positions, states.device)])
    return scores.squeeze(1)


def _last_positions(trees: Sequence[Tree], batch: TreeBatch, pad: int) -> np.ndarray:
    """Positions at which the branches are scored, in (rows * length).

    As in transformers, a text ends with its last token that is not the padding token: if a
    tokenizer pads with its EOS, the token before the EOS is scored.
    """
    positions = []
    for tree, (start, *begins) in zip(trees, batch.edges, strict=True):
        for branch, begin in zip(tree.branches, begins, strict=False):  # the last is an end
            if (kept := np.flatnonzero(branch != pad)).size:
                positions.append(begin + kept[-1])
            else:
                before = np.flatnonzero(tree.prompt != pad)
                positions.append(start + (before[-1] if before.size else 0))
    return np.array(positions, np.int64)


def require_known_ids(model: nn.Module, trees: Sequence[Tree]) -> None:
    """Refuses token ids without an embedding in the model."""
    known = causal_model(model).config.get_text_config(decoder=True).vocab_size
    parts = (ids for tree in trees for ids in (tree.prompt, *tree.branches))
    highest = max((int(ids.max(initial=0)) for ids in parts), default=0)
    if highest >= known:
        raise UsageError(
            f"The rows have the token id {highest}, but the model has only {known} embeddings. "
            "Resize them to the tokenizer (resize_token_embeddings), or use the tokenizer's own "
            "model."
        )


def causal_model(model: Any) -> Any:
    """The transformers model, without a PEFT wrapper; its layers stay adapted."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def input_device(model: nn.Module) -> torch.device:
    """The device that token ids are put on."""
    inner = causal_model(model)
    device: torch.device = inner.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    # The embedding is offloaded, and loaded onto the first GPU when it is called.
    gpus = gpus_of(inner)
    return torch.device(gpus[0] if gpus else "cpu")


def gpus_of(inner: Any) -> list[Any]:
    """The GPUs of the layers, in order, of a model with a device_map."""
    devices = getattr(inner, "hf_device_map", {}).values()
    return [device for device in devices if device not in {"cpu", "disk"}]


def own_attention(model: Any) -> str:
    """The attention with which a model was loaded, even if a layout has replaced it."""
    own: str = getattr(model, "replaced_attention", "") or attention_of(model)
    return own


def _use_attention(model: Any, path: ScoringPath) -> None:
    """Sets the attention of the path; packed batches replace the model's own."""
    own = own_attention(model)
    wanted = {"packed": PIECES, "flex": FLEX}.get(path.layout, own)
    if attention_of(model) == wanted:
        return
    model.replaced_attention = own
    with quiet():  # transformers warns that a composite has no tower to change
        model.set_attn_implementation(wanted)
    if attention_of(model) != wanted:
        raise ValueError("its attention cannot be replaced")


def _inputs(model: Any, batch: TreeBatch, path: ScoringPath) -> dict[str, Any]:
    """The inputs of the model for a batch; also sets the path's attention."""
    _use_attention(model, path)
    inputs: dict[str, Any] = {"input_ids": batch.token_ids}
    # A composite model passes on arguments that only its decoder names.
    takers = (model.forward, model.get_decoder().forward)
    if any("use_cache" in inspect.signature(taker).parameters for taker in takers):
        inputs["use_cache"] = False
    config = model.config.get_text_config(decoder=True)
    if path.layout != "plain":
        inputs |= {"position_ids": batch.positions, **rows_for_mixers(model, batch)}
    if path.layout == "packed":
        inputs["pieces"] = pieces_of(batch, config, model.dtype)
    elif path.layout == "flex":
        inputs["flex_masks"] = flex_masks(batch, config)
    elif path.layout == "tree":
        inputs["attention_mask"] = tree_mask(batch, config, model.dtype)
    elif batch.is_padded:
        inputs["attention_mask"] = (batch.segments != PAD).long()
    return inputs


def head_rows(model: Any, states: Tensor, targets: Tensor, *, collision_logps: bool) -> Tensor:
    """The fused head's log p of `targets` given `states` (T, hidden): (1 or 2, T) float32."""
    layer = model.get_output_embeddings()
    if isinstance(layer, LogpHead):
        rows: Tensor = layer(states, targets, collision_logps=collision_logps)
        return rows
    head = output_head(model)
    assert head is not None, "the probe chooses a fused head only if there is one"
    device = head.weight.device
    return fused_rows(head, states.to(device), targets.to(device), collision_logps=collision_logps)


def _exact_rows(logits: Tensor, batch: TreeBatch, *, collision_logps: bool) -> Tensor:
    """float32 log-softmax of the model's own logits (trees * length, vocabulary)."""
    pieces = []
    rows = max(1, EXACT_ELEMENTS // 4 // logits.shape[-1])
    targets = torch.split(batch.targets.to(logits.device), rows)
    for predictors, wanted in zip(torch.split(batch.predictors, rows), targets, strict=True):
        logps = torch.log_softmax(logits[predictors.to(logits.device)].float(), dim=-1)
        found = [logps.gather(1, wanted[:, None]).squeeze(1)]
        if collision_logps:
            found.append(torch.logsumexp(2 * logps.detach(), dim=-1))
        pieces.append(torch.stack(found))
    return torch.cat(pieces, dim=1)
