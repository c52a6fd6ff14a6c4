"""Attention over trees laid end to end without padding: one product per prompt and per branch.

A dense mask spends most of its work on pairs of tokens that may not see each other. Here a prompt
attends to itself, and each branch to `[prompt; itself]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .lean import AttentionInterface
from .masks import windows_by_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from .trees import TreeBatch

PIECES = "align_pieces"
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what sdpa leaves out, some models need


@dataclass(frozen=True)
class Pieces:
    """Where the trees lie, and the masks their pieces are cut from."""

    edges: tuple[tuple[int, ...], ...]  # per tree: start, end of prompt, end of each branch
    longest_prompt: int
    templates: Mapping[int | None, Tensor]  # by window


def pieces_of(batch: TreeBatch, config: Any, dtype: torch.dtype) -> Pieces:
    """Prepares a packed batch for the attention of its model."""
    prompts = [edges[1] - edges[0] for edges in batch.edges]
    branches = [stop - start for edges in batch.edges for start, stop in pairwise(edges[1:])]
    longest, device = max(prompts), batch.token_ids.device
    templates = {}
    for window in windows_by_kind(config).values():
        rows = max(branches) if window is None else max(prompts + branches)
        templates[window] = _template(longest, rows, window).to(device, dtype)
    return Pieces(batch.edges, longest, templates)


def attend_in_pieces(
    module: Any,
    query: Tensor,  # (1, heads, length, width)
    key: Tensor,  # (1, key heads, length, width)
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; refuses what it cannot honour."""
    pieces, window = options.get("pieces"), options.get("sliding_window")
    if pieces is None or window not in pieces.templates:
        raise ValueError("attention over packed trees was not told where they lie")
    if attention_mask is not None or any(options.get(name) is not None for name in UNKNOWN):
        raise ValueError("the model's attention adds something to its products")
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs: list[Tensor] = []
    # Split, never sliced: the gradient of every slice would be as long as the whole batch.
    parts = zip(*(_split(tensor, pieces) for tensor in (query, key, value)), strict=True)
    for (queries, keys, values), cut in zip(parts, _cuts(pieces, window), strict=True):
        if cut.is_prompt:
            prompt_keys, prompt_values = seen = keys, values
        else:
            seen = torch.cat([prompt_keys, keys], 2), torch.cat([prompt_values, values], 2)
        output = scaled_dot_product_attention(
            queries,
            *seen,
            attn_mask=cut.mask,
            dropout_p=options.get("dropout", 0.0),
            is_causal=cut.mask is None,
            scale=options.get("scaling"),
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


@dataclass(frozen=True)
class _Cut:
    """A prompt, or a branch of the prompt before it."""

    is_prompt: bool
    mask: Tensor | None  # (queries, keys); None: causal


def _split(tensor: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    sizes = [stop - start for edges in pieces.edges for start, stop in pairwise(edges)]
    parts: tuple[Tensor, ...] = torch.split(tensor, sizes, dim=2)
    return parts


def _cuts(pieces: Pieces, window: int | None) -> Iterator[_Cut]:
    """The prompt and the branches of each tree, in order."""
    template, origin = pieces.templates[window], pieces.longest_prompt
    for edges in pieces.edges:
        size = edges[1] - edges[0]
        yield _Cut(True, None if window is None else template[:size, origin : origin + size])
        for start, stop in pairwise(edges[1:]):
            length = stop - start
            yield _Cut(False, template[:length, origin - size : origin + length])


def _template(prompt: int, rows: int, window: int | None) -> Tensor:
    """Additive mask of a branch's row i and a key j positions after the fork (before it: j < 0).

    Distance is i - j whatever the lengths, so every piece's mask is a view of one template.
    """
    distance = torch.arange(rows)[:, None] - torch.arange(-prompt, rows)[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(distance.shape).masked_fill_(hidden, -torch.inf)


AttentionInterface.register(PIECES, attend_in_pieces)
