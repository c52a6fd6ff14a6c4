"""What stage 1 needs of a frozen reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from .rows import Tree


class OutOfMemory(Exception):  # noqa: N818 - a request to try again with less
    """The scorer had no room for this batch; a smaller one may fit."""


class Scorer(Protocol):
    """Log-probabilities of branches, given their prompts."""

    @property
    def pads(self) -> bool:
        """Whether every tree of a batch takes as many tokens as the longest of them."""
        ...

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Scores one batch: log p of every completion token, in the order tree, branch, token."""
        ...

    def in_float32(self) -> AbstractContextManager[None]:
        """Inside, `score` computes in float32 whatever the dtype; OutOfMemory without room."""
        ...

    def describe(self) -> Mapping[str, str]:
        """The way scores are computed, as far as it is chosen only once weights are loaded."""
        ...


class Reference(Protocol):
    """A reference that can say who it is long before its weights are loaded."""

    def identity(self) -> Mapping[str, str]:
        """Named digests and settings; two references with equal identities give equal scores."""
        ...

    def hidden_size(self) -> int:
        """Width of the residual stream, for the planner's cost of attention."""
        ...

    def open(self) -> Scorer:
        """Loads the weights."""
        ...
