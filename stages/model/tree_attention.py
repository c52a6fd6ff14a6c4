"""Batches of trees, padded with a mask or packed, and the attention over packed ones.

A padded batch has a row `[prompt | branch 1 | branch 2 | ...]` per tree. A packed batch has all
trees end to end, and one attention product per prompt and per branch, because a dense mask would
spend most of its work on masked pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...schemas.rows import Tree
from .copies import all_on_device
from .transformers_compat import AttentionInterface

PAD = -1


@dataclass(frozen=True)
class TreeBatch:
    """The trees of one batch, with T completion tokens in the order tree, branch, token.

    Padded: one row per tree. Packed: one row with all trees end to end.
    """

    token_ids: Tensor  # (rows, length) int64
    positions: Tensor  # (rows, length) int64, restarting at the end of the prompt
    segments: Tensor  # (rows, length) int64: 0 the prompt, 1.. the branches, -1 padding
    predictors: Tensor  # (T,) int64, index in (rows * length) of the state that predicts a token
    targets: Tensor  # (T,) int64
    edges: tuple[
        tuple[int, ...], ...
    ]  # per tree, in (rows * length): start, prompt end, branch ends

    @property
    def is_padded(self) -> bool:
        """Whether any position is padding; known without a device sync."""
        return sum(last - start for start, *_, last in self.edges) < self.token_ids.numel()


def tree_batch(
    trees: Sequence[Tree], device: torch.device, *, packed: bool = False, length: int = 0
) -> TreeBatch:
    """A batch of the trees, packed, or padded on the right to the longest tree.

    `length`: the least length of the row of packed trees.
    """
    sizes = [tree.num_tokens for tree in trees]
    shape = (1, max(sum(sizes), length)) if packed else (len(trees), max(sizes))
    starts = np.cumsum([0, *sizes[:-1]]) if packed else np.arange(len(trees)) * shape[1]
    grids = np.zeros((3, *shape), np.int64)
    grids[2] = PAD
    predictors, edges = [], []
    for start, tree in zip(starts.tolist(), trees, strict=True):
        columns, ends = _layout_of(tree)
        grids.reshape(3, -1)[:, start : start + ends[-1]] = columns
        predictors.append(start + predictors_of(ends))
        edges.append((start, *(start + ends).tolist()))
    targets = np.concatenate([branch for tree in trees for branch in tree.branches])
    token_ids, positions, segments, *flat = all_on_device(
        [*grids, np.concatenate(predictors), targets.astype(np.int64)], device
    )
    return TreeBatch(
        token_ids=token_ids,
        positions=positions,
        segments=segments,
        predictors=flat[0],
        targets=flat[1],
        edges=tuple(edges),
    )


def _layout_of(tree: Tree) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids, positions and segments, (3, tokens), and the ends of the prompt and branches."""
    assert len(tree.prompt) > 0, "a prompt has a token"
    lengths = [len(branch) for branch in tree.branches]
    edges = np.cumsum([len(tree.prompt), *lengths])
    fork = int(edges[0])
    after = np.arange(fork, edges[-1])
    begins = np.repeat(edges[:-1], lengths)
    token_ids = np.concatenate([tree.prompt, *tree.branches])
    positions = np.concatenate([np.arange(fork), after - begins + fork])
    segments = np.repeat(np.arange(len(edges)), [fork, *lengths])
    return np.stack([token_ids, positions, segments]), edges


def predictors_of(edges: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the hidden states that predict the tokens of branches with these edges."""
    tokens = np.arange(edges[0], edges[-1])
    begins = np.repeat(edges[:-1], np.diff(edges))
    # The last token of the prompt predicts the first of each branch.
    return np.where(tokens == begins, edges[0], tokens) - 1


def single_branches(trees: Sequence[Tree]) -> list[Tree]:
    """The same branches in the same order, each with its own copy of the prompt."""
    return [Tree(tree.prompt, (branch,)) for tree in trees for branch in tree.branches]


def groups_within(
    trees: Sequence[Tree], max_tokens: int, *, packed: bool = False
) -> Iterator[list[Tree]]:
    """Consecutive groups of at most `max_tokens` tokens; a longer tree goes alone."""
    group: list[Tree] = []
    total = longest = 0
    for tree in trees:
        total, longest = total + tree.num_tokens, max(longest, tree.num_tokens)
        if group and (total if packed else longest * (len(group) + 1)) > max_tokens:
            yield group
            group, total, longest = [], tree.num_tokens, tree.num_tokens
        group.append(tree)
    if group:
        yield group


FULL, SLIDING = "full_attention", "sliding_attention"
WITHOUT_MASK = {"linear_attention", "conv", "mlp", "moe"}  # layers that are not attention


def tree_mask(batch: TreeBatch, config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """The additive mask (trees, 1, length, length), or one per kind of layer."""
    visible = visible_keys(batch)
    masks = {
        kind: _additive(visible & _within(batch, window), dtype)
        for kind, window in windows_by_kind(config).items()
    }
    return next(iter(masks.values())) if len(masks) == 1 else masks


def visible_keys(batch: TreeBatch) -> Tensor:
    """Mask of the keys of each token: the prompt and its own branch: (trees, length, length)."""
    query, key = batch.segments[:, :, None], batch.segments[:, None, :]
    length = batch.segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    # A padding token sees itself, so that no row of the softmax is empty.
    return ((query == key) | (key == 0)) & causal


def windows_by_kind(config: Any) -> dict[str, int | None]:
    """The window size of each kind of attention layer; None: no window."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - WITHOUT_MASK
    if unknown := kinds - {FULL, SLIDING}:
        raise ValueError(f"layers of kind {sorted(unknown)} have no tree mask")
    if not kinds:
        return {SLIDING if window else FULL: window}
    if SLIDING not in kinds:
        return {FULL: None}
    return {FULL: None, SLIDING: window}


def _within(batch: TreeBatch, window: int | None) -> Tensor:
    """Mask of the keys within the window, by position: branches restart after the prompt."""
    length = batch.positions.shape[1]
    if window is None or window >= length:
        return torch.ones((), dtype=torch.bool, device=batch.positions.device)
    return batch.positions[:, :, None] - batch.positions[:, None, :] < window


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask: eager attention needs it, and sdpa would convert a bool in every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


PIECES = "align_pieces"
UNKNOWN = ("softcap", "s_aux", "position_bias")  # terms that sdpa lacks and some models need


# The most elements of a segment's mask; larger segments are computed by groups of rows.
MASK_ELEMENTS = 1 << 23
MASK_ROWS = 1024  # more rows at a time are not faster


@dataclass(frozen=True)
class MaskTemplate:
    """A mask whose views are the masks of all segments."""

    mask: Tensor  # (rows, before + rows): added to row i's logit of key `before + j`
    before: int  # keys before the first row
    is_whole: bool  # whether every segment fits into it; else segments are cut into its rows


@dataclass(frozen=True)
class Pieces:
    """The edges of packed trees, and the templates of their masks."""

    edges: tuple[tuple[int, ...], ...]  # per tree: start, end of prompt, end of each branch
    templates: Mapping[int | None, MaskTemplate]  # by window


def pieces_of(batch: TreeBatch, config: Any, dtype: torch.dtype) -> Pieces:
    """The edges and masks of a packed batch, for the attention of its model."""
    prompts = [edges[1] - edges[0] for edges in batch.edges]
    branches = [stop - start for edges in batch.edges for start, stop in pairwise(edges[1:])]
    longest, device = max(prompts), batch.token_ids.device
    templates = {}
    for window in windows_by_kind(config).values():
        rows = max(branches) if window is None else max(prompts + branches)
        before, is_whole = longest, rows * (longest + rows) <= MASK_ELEMENTS
        if not is_whole:
            before = longest + max(branches)  # at most so many keys precede any row
            before = before if window is None else min(before, window - 1)
            rows = max(1, min(rows, MASK_ROWS, MASK_ELEMENTS // (before + MASK_ROWS)))
        mask = _template(before, rows, window).to(device, dtype)
        templates[window] = MaskTemplate(mask, before, is_whole)
    return Pieces(batch.edges, templates)


def require_known(
    by_window: Mapping[int | None, Any] | None,
    attention_mask: Tensor | None,
    options: Mapping[str, Any],
    unknown: Sequence[str],
) -> None:
    """Refuses a layer with an unknown window or an unknown attention term."""
    if by_window is None or options.get("sliding_window") not in by_window:
        raise ValueError("attention over packed trees needs their edges")
    if attention_mask is not None or any(options.get(name) is not None for name in unknown):
        raise ValueError("the model's attention adds a term to its logits")


def attend_in_pieces(
    module: Any,
    query: Tensor,  # (1, heads, length, width)
    key: Tensor,  # (1, key heads, length, width)
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer; refuses unknown terms."""
    pieces: Any = options.get("pieces")
    window = options.get("sliding_window")
    require_known(pieces and pieces.templates, attention_mask, options, UNKNOWN)
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    template, outputs = pieces.templates[window], list[Tensor]()
    # Split instead of sliced: the gradient of each slice would be as long as the whole batch.
    sizes = [stop - start for edges in pieces.edges for start, stop in pairwise(edges)]
    parts = zip(*(torch.split(each, sizes, dim=2) for each in (query, key, value)), strict=True)
    # The first segment of each tree is its prompt; its branches follow.
    are_prompts = [at == 0 for edges in pieces.edges for at in range(len(edges) - 1)]
    for (queries, keys, values), is_prompt in zip(parts, are_prompts, strict=True):
        if is_prompt:
            # Views would keep all keys and values of the batch for the backward pass.
            prompt_keys, prompt_values = seen = keys.clone(), values.clone()
        else:
            seen = torch.cat([prompt_keys, keys], 2), torch.cat([prompt_values, values], 2)
        is_causal = is_prompt and window is None
        total = seen[0].shape[2]
        for rows, visible, mask in _cuts(template, queries.shape[2], total, is_causal=is_causal):
            output = scaled_dot_product_attention(
                _part(queries, rows),
                _part(seen[0], visible),
                _part(seen[1], visible),
                attn_mask=mask,
                dropout_p=options.get("dropout", 0.0),
                is_causal=is_causal,
                scale=options.get("scaling"),
            )
            outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _cuts(
    template: MaskTemplate, rows: int, keys: int, *, is_causal: bool
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(rows, visible keys, mask) of a segment, whose own keys are the last ones."""
    if is_causal:
        yield slice(0, rows), slice(0, keys), None
        return
    height, before = len(template.mask), template.before
    for start in range(0, rows, height):
        stop = min(start + height, rows)
        # The distance is i - j for any lengths, so every mask is a shifted view of the template.
        first = keys - rows + start
        begin = 0 if template.is_whole else max(0, first - before)
        end = first + stop - start
        mask = template.mask[: stop - start, before - (first - begin) : before + stop - start]
        yield slice(start, stop), slice(begin, end), mask


def _part(tensor: Tensor, tokens: slice) -> Tensor:
    is_all = tokens.start == 0 and tokens.stop == tensor.shape[2]
    return tensor if is_all else tensor[:, :, tokens]


def _template(before: int, rows: int, window: int | None) -> Tensor:
    """The additive mask for row i and key `before + j`, which is i - j positions before it."""
    offsets = torch.arange(-before, rows, dtype=torch.int32)
    distance = offsets[before:, None] - offsets[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(distance.shape).masked_fill_(hidden, -torch.inf)


AttentionInterface.register(PIECES, attend_in_pieces)
