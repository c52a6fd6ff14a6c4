"""Logits that a forward pass keeps for its backward pass, in a buffer of a fixed size.

To project them again is a quarter of a head's work, all of which is saved where tokens of a batch
times vocabulary is at most 16 million. What does not fit is projected again, so that memory grows
with neither.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ROOM_BYTES = 64 << 20

Place = tuple[int, int]  # the first position and the first token of a tile


class KeptLogits:
    """The tiles of one call that there is room for, the first ones first."""

    def __init__(self, room: Tensor | None = None) -> None:
        self.tiles: dict[Place, Tensor] = {}
        self.is_needed = True
        self._room = torch.empty(0) if room is None else room

    def give_back(self) -> None:
        """The next call may have the room, whatever is in it."""
        self.is_needed = False

    def forget(self) -> None:
        """The room is another's: whoever comes back here has to project again."""
        self.tiles.clear()
        self._room = self._room[:0]

    def space(self, place: Place, shape: tuple[int, int]) -> Tensor | None:
        """Where a tile is to be written, for good; None where it is not kept."""
        size = shape[0] * shape[1]
        if size > len(self._room):
            return None
        tile, self._room = self._room[:size].view(shape), self._room[size:]
        self.tiles[place] = tile
        return tile


class LogitsRoom:
    """The buffer of a head, which one call has at a time; the others keep nothing.

    It outlives the calls: getting as much memory anew costs more than it saves.
    """

    def __init__(self, size: int = ROOM_BYTES) -> None:
        self._size = size
        self._buffer: Tensor | None = None
        self._last: weakref.ref[KeptLogits] | None = None

    def __reduce__(self) -> tuple[type[LogitsRoom], tuple[int]]:
        return LogitsRoom, (self._size,)  # a copy of the head has a room of its own

    def lend(self, device: torch.device) -> KeptLogits:
        """Room for the tiles of a call, until they are given back or nobody holds them."""
        last = self._last() if self._last is not None else None
        if last is not None:
            if last.is_needed:
                return KeptLogits()
            last.forget()
        if self._buffer is None or self._buffer.device != device:
            elements = self._size // torch.float32.itemsize
            self._buffer = torch.empty(elements, dtype=torch.float32, device=device)
        kept = KeptLogits(self._buffer)
        self._last = weakref.ref(kept)
        return kept
