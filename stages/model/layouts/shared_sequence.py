"""Sequence parallelism: several ranks share a sequence, each computes with a part of its tokens.

Attention alone needs all tokens: there each rank has some of the heads, and all tokens. A rank's
part of the sequence gives its part of every gradient, and the parts are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.nn.functional import pad

from ....schemas.batches import SequenceGroup
from ..copies import on_device
from ..transformers_compat import AttentionInterface

SHARED = "align_shared"
SHARED_FOR_EAGER = "align_shared_for_eager"  # of models whose own attention is not sdpa

Attention = Callable[..., tuple[Tensor, Any]]  # over all tokens, as transformers calls it


@dataclass(frozen=True)
class SequencePart:
    """This rank's part of one sequence, and of the items that are computed at its positions."""

    group: SequenceGroup
    attention: Attention
    length: int  # tokens of the whole sequence
    states: Tensor  # (own items,) int64: index of the item's state among this rank's states
    items: Tensor  # (own items,) int64: index among all items
    order: Tensor  # (items,) int64: index in the ranks' items, each padded to `most`, end to end
    most: int  # items of the rank that has the most

    @property
    def tokens(self) -> int:
        """Tokens of a rank; the last ones may be padding."""
        return -(-self.length // self.group.size)


def part_of(tokens: Tensor, group: SequenceGroup) -> Tensor:
    """This rank's part of values of every token, (1, length), padded with zeros."""
    part = -(-tokens.shape[1] // group.size)
    own = tokens[:, group.rank * part :][:, :part]
    return pad(own, (0, part - own.shape[1]))


def sequence_part(
    group: SequenceGroup, attention: Attention, positions: NDArray[np.int64], tokens: Tensor
) -> SequencePart:
    """This rank's part of a sequence, (1, length), and of the items at these positions."""
    assert len(tokens) == 1, "ranks share a row that holds all trees"
    length, device = tokens.shape[1], tokens.device
    part = -(-length // group.size)
    owners = positions // part
    counts = np.bincount(owners, minlength=group.size)
    most = int(counts.max())
    order = np.empty(len(positions), np.int64)
    for rank in range(group.size):
        order[owners == rank] = rank * most + np.arange(counts[rank])
    own = np.flatnonzero(owners == group.rank)
    return SequencePart(
        group=group,
        attention=attention,
        length=length,
        states=on_device(positions[own] - group.rank * part, device),
        items=on_device(own, device),
        order=on_device(order, device),
        most=most,
    )


def joined(rows: Tensor, part: SequencePart) -> Tensor:
    """All ranks' items in order, (rows, items), gathered from each one's (rows, own items).

    All ranks continue with the same numbers, so each has the gradient of all items, and passes on
    that of its own.
    """
    whole: Tensor = _Join.apply(rows, part)  # type: ignore[no-untyped-call]
    return whole


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: SequencePart) -> Tensor:
        ctx.part = part
        own = pad(rows, (0, part.most - rows.shape[1])).contiguous()
        every = own.new_empty(part.group.size * len(own), part.most)
        distributed.all_gather_into_tensor(every, own, group=part.group.process_group)
        by_rank = every.view(part.group.size, *own.shape)
        return by_rank.movedim(0, 1).flatten(1)[:, part.order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.part.items], None


def summed(values: Tensor, group: SequenceGroup) -> Tensor:
    """The all-reduced sum over the ranks; its gradient goes to every rank's summand unchanged."""
    total: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        total = values.clone()
        distributed.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def attend_shared(
    module: Any,
    query: Tensor,  # (1, heads, part, width)
    key: Tensor,  # (1, key heads, part, width)
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: all tokens for some of the heads."""
    part: SequencePart | None = options.pop("sequence_part", None)
    if part is None:
        raise ValueError("attention over a shared sequence was not given this rank's part of it")
    heads, ranks = query.shape[1], part.group.size
    # As few copies of a key's head as give every rank the keys of its queries.
    is_even = heads % ranks == 0
    copies = ranks // gcd(ranks, key.shape[1]) if is_even else heads // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    query, key, value = (_all_tokens(one, part) for one in (query, key, value))
    output, _ = part.attention(module, query, key, value, attention_mask, **options)
    return _own_tokens(output, part)[:, :, :heads], None


def _all_tokens(tensor: Tensor, part: SequencePart) -> Tensor:
    """All tokens of some heads, (1, heads / ranks, length, width), from this rank's of all heads.

    Heads that cannot be divided are padded with zeros.
    """
    missing = -tensor.shape[1] % part.group.size
    filled = pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor
    return _exchanged(filled, part.group, 1, 2)[:, :, : part.length]


def _own_tokens(output: Tensor, part: SequencePart) -> Tensor:
    """This rank's tokens of all heads, (1, part, heads, width), from all tokens of some heads."""
    missing = part.tokens * part.group.size - part.length
    filled = pad(output, (0, 0, 0, 0, 0, missing)) if missing else output
    return _exchanged(filled, part.group, 1, 2)


def _exchanged(tensor: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
    """An all-to-all: dimension `split` is divided among the ranks, and joined along `join`."""
    exchanged: Tensor = _Exchange.apply(tensor, group, split, join)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
        ctx.way_back = group, join, split
        return _all_to_all(tensor, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, *ctx.way_back), None, None, None


def _all_to_all(tensor: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
    shape = (*tensor.shape[:split], group.size, -1, *tensor.shape[split + 1 :])
    sent = tensor.reshape(shape).movedim(split, 0).contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group.process_group)
    return received.movedim(0, join).flatten(join, join + 1)


for _name in (SHARED, SHARED_FOR_EAGER):
    AttentionInterface.register(_name, attend_shared)
