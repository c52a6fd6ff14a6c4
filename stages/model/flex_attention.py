"""Attention over packed trees on a GPU: one FlexAttention kernel that skips masked blocks.

Every token sees two ranges of the batch: its own segment up to itself, and the prompt of its tree.
The limits of these ranges give both the kernel's mask and its block table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ...schemas.errors import UsageError
from .copies import all_on_device
from .transformers_compat import AttentionInterface, allow_compilations
from .tree_attention import TreeBatch, require_known, windows_by_kind

FLEX = "align_flex"
REFUSED = ("position_bias",)  # a term that some models add to attention logits
BLOCK = 128
# torch assumes that sizes which are equal when it compiles a kernel are always equal, for example
# the numbers of blocks and of heads. Few models have seven of anything.
LEAST = 7 * BLOCK


def padded_to_blocks(tokens: int) -> int:
    """The padded length of a batch, a multiple of the block size."""
    return max(LEAST, -(-tokens // BLOCK) * BLOCK)


def why_no_flex(attention: str, config: Any = None) -> str:
    """The reason not to use FlexAttention: the setting, or attention dropout; "" if none."""
    if attention != "auto":
        return f"model.attention is {attention}"
    if config is None:
        return ""
    for name, value in vars(config.get_text_config(decoder=True)).items():
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
            return f"FlexAttention has no dropout, and {name} is {value}"
    return ""


def key_ranges(
    edges: Sequence[tuple[int, ...]], length: int, window: int | None = None
) -> NDArray[np.int32]:
    """The ranges of keys that each token sees; `edges` of a tree: start, prompt end, branch ends.

    (3, length): the start of the token's own segment, which it sees up to itself; the start of its
    prompt; the end of its prompt. Padding sees itself.
    """
    pieces = [piece for tree in edges for piece in _pieces(tree)]
    sizes = [stop - begin for begin, stop, _, _ in pieces]
    columns = np.array(pieces, np.int64)[:, [0, 2, 3]]
    begin, prompt, fork = np.repeat(columns, sizes, axis=0).T
    index = np.arange(length)
    ranges = np.stack([index, np.zeros_like(index), np.zeros_like(index)])
    used = len(begin)
    ranges[:, :used] = begin, prompt, fork
    if window is not None:
        depth = index[:used] - begin  # positions continue from the end of the prompt
        np.maximum(begin, index[:used] - window + 1, out=ranges[0, :used])
        np.clip(fork + depth - window + 1, prompt, fork, out=ranges[1, :used])
    return ranges.astype(np.int32)


def _pieces(edges: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(begin, stop, prompt begin, prompt end) of a tree's prompt and of each of its branches."""
    start, fork = edges[:2]
    branches = [(begin, stop, start, fork) for begin, stop in pairwise(edges[1:])]
    return [(start, fork, 0, 0), *branches]


def block_tables(ranges: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Counts and lists of the key blocks that each query block sees partly, and wholly.

    Then the same for the query blocks of each key block. Both follow from the number of queries
    that see some or all of a block.
    """
    own, prompt, fork = ranges
    seen = ((own, np.arange(len(own)) + 1), (prompt, fork))
    some = sum(_queries(first // BLOCK, -(-stop // BLOCK), first < stop) for first, stop in seen)
    every = sum(_queries(-(-first // BLOCK), stop // BLOCK) for first, stop in seen)
    wholly = np.equal(every, BLOCK)
    partly = np.greater(some, 0) & ~wholly
    tables: list[NDArray[np.int32]] = []
    for marked in (partly, wholly, partly.T, wholly.T):
        counts = marked.sum(axis=1)
        rows, columns = np.nonzero(marked)
        lists = np.zeros(marked.shape, np.int32)  # left-aligned
        lists[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
        tables += [counts.astype(np.int32)[None, None], lists[None, None]]
    return tables


def _queries(first: NDArray[Any], stop: NDArray[Any], which: Any = True) -> NDArray[np.int64]:
    """Counts of the queries of each block that see each key block in [first, stop)."""
    blocks = len(first) // BLOCK
    width = blocks + 1
    seen = (first < stop) & which
    row = (np.arange(len(first)) // BLOCK * width)[seen]
    begins = np.bincount(row + first[seen], minlength=blocks * width)
    ends = np.bincount(row + stop[seen], minlength=blocks * width)
    counts: NDArray[np.int64] = (begins - ends).reshape(blocks, width).cumsum(axis=1)[:, :-1]
    return counts


def flex_masks(batch: TreeBatch, config: Any) -> Mapping[int | None, BlockMask]:
    """Block masks by window size, one per kind of layer, in a single copy to the device."""
    length = batch.token_ids.shape[1]
    tables: list[NDArray[np.int32]] = []
    windows = list(windows_by_kind(config).values())
    for window in windows:
        ranges = key_ranges(batch.edges, length, window)
        tables += [*ranges, *block_tables(ranges)]
    copied = all_on_device(tables, batch.token_ids.device)
    per_mask = len(tables) // len(windows)
    return {
        window: _block_mask(length, copied[index * per_mask :][:per_mask])
        for index, window in enumerate(windows)
    }


def _block_mask(length: int, tables: Sequence[Tensor]) -> BlockMask:
    own, prompt, fork, *blocks = tables
    by_query, by_key = blocks[:4], blocks[4:]

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_piece = (key >= own[query]) & (key <= query)
        in_prompt = (key >= prompt[query]) & (key < fork[query])
        return in_piece | in_prompt

    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=by_query[0],
        kv_indices=by_query[1],
        full_kv_num_blocks=by_query[2],
        full_kv_indices=by_query[3],
        q_num_blocks=by_key[0],
        q_indices=by_key[1],
        full_q_num_blocks=by_key[2],
        full_q_indices=by_key[3],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )


def attend_by_flex(
    module: Any,
    query: Tensor,  # (1, heads, length, width)
    key: Tensor,  # (1, key heads, length, width)
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer; refuses unknown terms."""
    masks: Any = options.get("flex_masks")
    window = options.get("sliding_window")
    require_known(masks, attention_mask, options, REFUSED)
    if options.get("dropout"):
        raise UsageError(
            "FlexAttention has no dropout, but the model's attention has. Set train.dropout to "
            "false, or model.attention to sdpa."
        )
    attend: Any = compiled_flex_attention() if query.device.type == "cuda" else flex_attention
    sinks = options.get("s_aux")
    sums_too = {} if sinks is None else {"return_aux": AuxRequest(lse=True)}
    output = attend(
        query,
        key,
        value,
        score_mod=_capped(options.get("softcap"), query.device),
        block_mask=masks[window],
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
        **sums_too,
    )
    if sinks is not None:
        # A head's sink is one more key with value zero: it only takes its share of the softmax.
        output, sums = output
        share = torch.sigmoid(sums.lse - sinks[None, :, None])
        output = (output * share[..., None]).to(output.dtype)
    return output.transpose(1, 2), None


@cache
def _capped(softcap: float | None, device: torch.device) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    # A tensor, because torch would compile the kernel again for each plain number.
    with torch.inference_mode(False):  # it outlives this pass
        cap = torch.full((), softcap, dtype=torch.float32, device=device)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """The compiled FlexAttention kernel for batches of every length.

    A kernel per length is faster (1.2 instead of 1.9 ms for a layer of 16,384 tokens, forward and
    backward, on an H100), but takes five to eleven seconds to compile. Padding to few lengths costs
    more in all layers than it saves in attention.
    """
    allow_compilations()
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


AttentionInterface.register(FLEX, attend_by_flex)
