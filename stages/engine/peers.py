"""What ranks tell each other besides tensors: decisions of the first, failures of any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from ...schemas.errors import AlignError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...schemas.engine import World

T = TypeVar("T")


def from_first(world: World, action: Callable[[], T]) -> T:
    """What the first rank's action returns, on every rank; its refusal is everyone's."""
    result: Any = _outcome(action) if world.rank == 0 else None
    if world.size > 1:
        box = [result]
        distributed.broadcast_object_list(box, src=0)
        result = box[0]
    opened: T = _opened(result)
    return opened


def together(world: World, action: Callable[[], T]) -> T:
    """What the action returns on this rank; one rank's refusal is everyone's."""
    own = _outcome(action)
    refusal = own if isinstance(own, _Refused) else None
    for other in gathered(world, refusal):
        _opened(other)
    return own  # type: ignore[return-value]


def gathered(world: World, mine: T) -> list[T]:
    """What every rank passes, in the order of ranks."""
    if world.size == 1:
        return [mine]
    every: list[Any] = [None] * world.size
    distributed.all_gather_object(every, mine)
    return every


def _outcome(action: Callable[[], T]) -> T | _Refused:
    try:
        return action()
    except AlignError as error:
        return _Refused(error)


def _opened(result: Any) -> Any:
    if isinstance(result, _Refused):
        raise result.error
    return result


class _Refused:
    def __init__(self, error: AlignError) -> None:
        self.error = error
