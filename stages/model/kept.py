"""Logits that a forward pass keeps for its backward pass, in a buffer of a fixed size.

To project them again is a quarter of a head's work. What does not fit is projected again, so that
memory grows with neither vocabulary nor positions.
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
        self._room = torch.empty(0) if room is None else room

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
        self._elements = size // torch.float32.itemsize
        self._buffer: Tensor | None = None
        self._lent: weakref.ref[KeptLogits] | None = None

    def lend(self, device: torch.device) -> KeptLogits:
        """Room for the tiles of a call, until it is given back or forgotten."""
        if self._lent is not None and self._lent() is not None:
            return KeptLogits()
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.empty(self._elements, dtype=torch.float32, device=device)
        kept = KeptLogits(self._buffer)
        self._lent = weakref.ref(kept)
        return kept

    def give_back(self, kept: KeptLogits) -> None:
        """The next call may overwrite what is in `kept`."""
        if self._lent is not None and self._lent() is kept:
            self._lent = None
