"""Makes items in a background thread, so many ahead of whoever takes them and no more."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An iterator; an error of the thread is raised where its item would have been.

    The item that was taken last counts as in use until the next one is asked for, so at most
    `1 + ahead` items exist at any time.
    """

    def __init__(self, items: Iterable[T], *, ahead: int) -> None:
        self._items = items
        self._made: SimpleQueue[_Item[T] | _End] = SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, name="align-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        self._room.release()
        made = self._made.get()
        if isinstance(made, _Item):
            return made.value
        self.close()
        if made.error is not None:
            raise made.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread; what it is making at this moment is thrown away."""
        self._closed.set()
        self._room.release()
        self._thread.join()

    def _make(self) -> None:
        end = _End(None)
        try:
            items = iter(self._items)
            while self._has_room():
                try:
                    item = _Item(next(items))
                except StopIteration:
                    break
                self._made.put(item)
                del item
        except BaseException as error:
            end = _End(error)
        self._made.put(end)

    def _has_room(self) -> bool:
        self._room.acquire()
        return not self._closed.is_set()


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None
