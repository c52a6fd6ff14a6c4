"""Classes of modules, made while a program runs, whose modules can be copied and pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def with_forward(
    kind: type[nn.Module], forward: Callable[..., Any], make: Callable[..., type], *given: Any
) -> type[nn.Module]:
    """A subclass with this `forward`, for `make(kind, *given)` to return.

    A pickle names `make`, which has to be a function of a module, and what it was given.
    """

    def reduced(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        found: Any = kind.__reduce_ex__(self, max(protocol, 2))
        return _empty, (make, kind, *given), *found[2:]

    methods = {"forward": forward, "__reduce_ex__": reduced}
    return type(kind.__name__, (kind,), methods)


def _empty(make: Callable[..., type], *given: Any) -> Any:
    kind: Any = make(*given)
    return kind.__new__(kind)
