"""Loads the reference in a thread while this process prepares rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from ...schemas.rows import Reference, Scorer


@dataclass(frozen=True)
class OpenedBy:
    """A reference that is opened in another way."""

    reference: Reference
    open: Callable[[], Scorer]

    def identity(self) -> Mapping[str, str]:
        """The identity of the reference."""
        return self.reference.identity()

    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.reference.hidden_size()


@contextmanager
def opened_meanwhile(reference: Reference) -> Iterator[tuple[Reference, Callable[[], float]]]:
    """The reference, which is being opened from now on, and the seconds that has taken so far.

    Whoever opens it has the error, if any. Who leaves the block before does not wait for it, but
    the next opening does, and so does the end of the process: no thread is ended inside of torch.
    """
    opening = _Opening(_on_same_gpu(reference.open))
    opening.start()
    try:
        yield OpenedBy(reference, opening.scorer.result), opening.seconds
    finally:
        opening.is_left.set()


class _Opening(threading.Thread):
    _one_at_a_time = threading.Lock()

    def __init__(self, open_scorer: Callable[[], Scorer]) -> None:
        super().__init__(name="align-load")
        self.scorer = Future[Scorer]()
        self.is_left = threading.Event()
        self._open = open_scorer
        self._began = time.perf_counter()
        self._ended: float | None = None

    def run(self) -> None:
        """Opens it, unless nobody waits for it any more."""
        try:
            with self._one_at_a_time:
                scorer = None if self.is_left.is_set() else self._open()
        except BaseException as error:  # of any kind: somebody may wait for the scorer
            self.scorer.set_exception(error)
        else:
            self._ended = time.perf_counter()
            if scorer is not None:
                self.scorer.set_result(scorer)

    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (self._ended or time.perf_counter()) - self._began


def _on_same_gpu(open_scorer: Callable[[], Scorer]) -> Callable[[], Scorer]:
    """A new thread begins on the first GPU, whichever this one has chosen."""
    # Here, because only a reference that computes by torch needs it imported.
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return open_scorer
    device = torch.cuda.current_device()

    def opened() -> Scorer:
        torch.cuda.set_device(device)
        return open_scorer()

    return opened
