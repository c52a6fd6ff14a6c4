"""The feed of the training loop: steps of a cache, read in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import Cursor, StepBatch, StepSize
from .row_buffer import Piece, RowBuffer, fill_buffer, read_pieces, step_batch
from .step_plan import FeedSettings, Pass, StepPlan, evaluation_pass, num_steps, training_pass
from .train_source import TrainSource

Steps = AbstractContextManager[Iterator[StepBatch]]


@dataclass(frozen=True)
class CacheFeed:
    """Training rows, and rows held out of them or of another cache."""

    source: TrainSource
    held_out_source: TrainSource
    settings: FeedSettings

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return steps_per_epoch(self.source, self.settings)

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.held_out_source.eval_rows > 0

    def held_out_size(self) -> StepSize:
        """All rows of an evaluation, over all ranks."""
        return evaluation_pass(self.held_out_source.index.held_out, self.settings).size()

    def steps(self, start: Cursor) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches from a cursor to the end of the last epoch."""
        return stream(self.source, self.settings, start=start)

    def held_out(self) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches of the held-out rows."""
        return eval_stream(self.held_out_source, self.settings)


WINDOWS_AHEAD = 1


def steps_per_epoch(source: TrainSource, settings: FeedSettings) -> int:
    """Optimizer steps in each epoch."""
    return num_steps(source.train_rows, settings.batch_size, settings.limit_train_batches)


def stream(source: TrainSource, settings: FeedSettings, *, start: Cursor) -> Steps:
    """The steps of this rank from `start` to the end of the last epoch."""
    return _streamed(source, settings, _loads_of_epochs(source, settings, start))


def eval_stream(source: TrainSource, settings: FeedSettings) -> Steps:
    """One pass over the held-out rows, the same each time."""
    once = evaluation_pass(source.index.held_out, settings)
    return _streamed(source, settings, _loads(source, once, 0))


@dataclass(frozen=True)
class _Load:
    """Steps that become whole with the same window, and the rows this rank needs for them."""

    one_pass: Pass
    plans: list[StepPlan]
    buffer: RowBuffer


@contextmanager
def _streamed(
    source: TrainSource, settings: FeedSettings, loads: Iterator[_Load]
) -> Iterator[Iterator[StepBatch]]:
    prefetch = Prefetch(loads, ahead=WINDOWS_AHEAD)
    try:
        yield _batches(prefetch, settings.world.rank)
    finally:
        prefetch.close()


def _batches(loads: Iterator[_Load], rank: int) -> Iterator[StepBatch]:
    for load in loads:
        for plan in load.plans:
            yield step_batch(plan, load.buffer, load.one_pass.table, rank=rank)
        del load  # before the next is asked for: memory holds one in use


def _loads_of_epochs(source: TrainSource, settings: FeedSettings, start: Cursor) -> Iterator[_Load]:
    first = start.step
    for epoch in range(start.epoch, settings.epochs):
        one_pass = training_pass(source.index.train, settings, epoch=epoch)
        yield from _loads(source, one_pass, first)
        first = 0


def _loads(source: TrainSource, one_pass: Pass, first_step: int) -> Iterator[_Load]:
    """Reads window after window; rows of a step that continues in the next window are kept."""
    planned, waiting, pieces = first_step, list[StepPlan](), list[Piece]()
    order, size = one_pass.order, one_pass.settings.batch_size
    for window in range(order.window_at(first_step * size), order.num_windows):
        end = int(order.window_offsets[window + 1])
        begun = max(planned, min(-(-end // size), one_pass.num_steps))
        waiting += one_pass.plans(planned, begun)
        planned = begun
        if not waiting:
            return
        pieces += _pieces_of_window(source, one_pass, window, waiting)
        whole = sum(one_pass.end(plan.cursor.step) <= end for plan in waiting)
        if whole:
            load = _Load(one_pass, waiting[:whole], fill_buffer(source, pieces))
            waiting = waiting[whole:]
            pieces = _kept(pieces, _wanted(one_pass, waiting))
            yield load


def _pieces_of_window(
    source: TrainSource, one_pass: Pass, window: int, plans: list[StepPlan]
) -> list[Piece]:
    wanted = _wanted(one_pass, plans)
    groups = one_pass.order.groups_of(window)
    here = np.isin(one_pass.table.group_of(wanted), groups)
    return read_pieces(source, one_pass.table, wanted[here])


def _kept(pieces: list[Piece], wanted: NDArray[np.int64]) -> list[Piece]:
    kept = [piece.keep(wanted) for piece in pieces]
    return [piece for piece in kept if len(piece.numbers)]


def _wanted(one_pass: Pass, plans: list[StepPlan]) -> NDArray[np.int64]:
    """The rows of these steps that this rank needs."""
    rank = one_pass.settings.world.rank
    rows = [plan.rows_of_rank(rank) for plan in plans]
    return np.concatenate([np.empty(0, dtype=np.int64), *rows])


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
        """Ends the thread; an item in the making is dropped."""
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
