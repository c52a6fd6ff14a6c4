"""A sequence that several ranks share: each computes with a part of its tokens.

Attention alone needs all of them: there each rank has some of the heads, and all tokens. What a
rank has of the sequence gives its part of every gradient, and the parts are summed over the ranks.
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

from ...schemas.batches import SequenceGroup
from .copies import on_device
from .transformers_compat import AttentionInterface

SHARED = "align_shared"
SHARED_FOR_EAGER = "align_shared_for_eager"  # of models whose own attention is not sdpa

Attention = Callable[..., tuple[Tensor, Any]]  # over all tokens, as transformers calls it


@dataclass(frozen=True)
class SequenceShare:
    """This rank's part of one sequence, and of what is computed at some of its places."""

    group: SequenceGroup
    attention: Attention
    length: int  # tokens of the whole sequence
    states: Tensor  # (own items,) int64: which of this rank's states each is computed of
    items: Tensor  # (own items,) int64: which of all items each is
    order: Tensor  # (items,) int64: where each is among those of all ranks, end to end
    most: int  # items of the rank that has the most

    @property
    def part(self) -> int:
        """Tokens of a rank; the last ones may be padding."""
        return -(-self.length // self.group.size)


def part_of(tokens: Tensor, group: SequenceGroup) -> Tensor:
    """This rank's part of what there is of every token, (1, length), filled up with zeros."""
    part = -(-tokens.shape[1] // group.size)
    own = tokens[:, group.rank * part :][:, :part]
    return pad(own, (0, part - own.shape[1]))


def share_of(
    group: SequenceGroup, attention: Attention, places: NDArray[np.int64], tokens: Tensor
) -> SequenceShare:
    """What this rank has of a sequence, (1, length), and of the items at these places of it."""
    assert len(tokens) == 1, "ranks share a row that holds all trees"
    length, device = tokens.shape[1], tokens.device
    part = -(-length // group.size)
    owners = places // part
    counts = np.bincount(owners, minlength=group.size)
    most = int(counts.max())
    order = np.empty(len(places), np.int64)
    for rank in range(group.size):
        order[owners == rank] = rank * most + np.arange(counts[rank])
    own = np.flatnonzero(owners == group.rank)
    return SequenceShare(
        group=group,
        attention=attention,
        length=length,
        states=on_device(places[own] - group.rank * part, device),
        items=on_device(own, device),
        order=on_device(order, device),
        most=most,
    )


def joined(rows: Tensor, share: SequenceShare) -> Tensor:
    """The items of all ranks in their order, (rows, items), of this rank's (rows, own items).

    All ranks go on with the same numbers, so each has the gradient of all of them, and hands its
    own items theirs.
    """
    whole: Tensor = _Join.apply(rows, share)  # type: ignore[no-untyped-call]
    return whole


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: SequenceShare) -> Tensor:
        ctx.share = share
        own = pad(rows, (0, share.most - rows.shape[1])).contiguous()
        every = own.new_empty(share.group.size * len(own), share.most)
        distributed.all_gather_into_tensor(every, own, group=share.group.process_group)
        by_rank = every.view(share.group.size, *own.shape)
        return by_rank.movedim(0, 1).flatten(1)[:, share.order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.share.items], None


def summed(values: Tensor, group: SequenceGroup) -> Tensor:
    """The sum over the ranks, on each of them; what each has added gets the gradient of the sum."""
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
    """What transformers calls in each layer: this rank attends with all tokens for some heads."""
    share: SequenceShare | None = options.pop("share", None)
    if share is None:
        raise ValueError("attention over a shared sequence was not given this rank's part of it")
    heads, ranks = query.shape[1], share.group.size
    # As few copies of a key's head as let every rank have those that its queries look at.
    is_even = heads % ranks == 0
    copies = ranks // gcd(ranks, key.shape[1]) if is_even else heads // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    query, key, value = (_all_tokens(one, share) for one in (query, key, value))
    output, _ = share.attention(module, query, key, value, attention_mask, **options)
    return _own_tokens(output, share)[:, :, :heads], None


def _all_tokens(tensor: Tensor, share: SequenceShare) -> Tensor:
    """All tokens for some heads, (1, heads / ranks, length, width), of this rank's for all heads.

    Heads that cannot be divided are filled up with zeros.
    """
    missing = -tensor.shape[1] % share.group.size
    filled = pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor
    return _exchanged(filled, share.group, 1, 2)[:, :, : share.length]


def _own_tokens(output: Tensor, share: SequenceShare) -> Tensor:
    """This rank's tokens for all heads, (1, part, heads, width), of all tokens for some."""
    missing = share.part * share.group.size - share.length
    filled = pad(output, (0, 0, 0, 0, 0, missing)) if missing else output
    return _exchanged(filled, share.group, 1, 2)


def _exchanged(tensor: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
    """Each rank gets its part of dimension `split` from all, which are joined along `join`."""
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
