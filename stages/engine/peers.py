"""What ranks tell each other besides tensors: decisions of the first, failures of any."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from ...schemas.errors import AlignError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...schemas.batches import World

T = TypeVar("T")

# While one rank hashes a cache or writes a model the others wait; one that dies is noticed at once.
PATIENCE = timedelta(days=1)
_PATIENT_GROUP: list[Any] = []


def open_patient_group() -> None:
    """Opens what ranks talk over when one of them may take long; all of them call it together."""
    _PATIENT_GROUP[:] = [distributed.new_group(backend="gloo", timeout=PATIENCE)]


def close_patient_group() -> None:
    """Forgets it; the process groups of a world are destroyed together."""
    _PATIENT_GROUP.clear()


def _patient_group() -> Any:
    """None, the usual one, where nobody has opened it."""
    return _PATIENT_GROUP[0] if _PATIENT_GROUP else None


def from_first(world: World, action: Callable[[], T]) -> T:
    """What the first rank's action returns, on every rank; its refusal is everyone's."""
    result: Any = _outcome(action) if world.rank == 0 else None
    if world.size > 1:
        box = [result]
        distributed.broadcast_object_list(box, src=0, group=_patient_group())
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
    distributed.all_gather_object(every, mine, group=_patient_group())
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
