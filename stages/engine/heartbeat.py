"""Whether every rank is still there: each one beats, in the store where they met.

A machine that loses its power or its network closes no connection: its peers would wait in a
collective for as long as that may take. A rank that is slow to save or to evaluate beats on, since
a thread of its own does it. Each rank listens to the one before it, and the first to miss another
tells all.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

from ...schemas.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...schemas.batches import World

logger = logging.getLogger("align")

BEAT_SECONDS = 2.0
LOST_SECONDS = 180.0
_ANSWER = timedelta(seconds=30)
_STORE: Any = vars(distributed)["TCPStore"]  # its stub exports no stores


@contextmanager
def heartbeat(world: World) -> Iterator[None]:
    """Beats as long as the block runs; where another rank does not, this process ends."""
    if world.size == 1:
        yield
        return
    pulse = Pulse(world)
    threads = [
        threading.Thread(target=work, name="heartbeat", daemon=True)
        for work in (pulse.beat, pulse.watch)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        pulse.over.set()
        threads[0].join(2 * BEAT_SECONDS)  # not long: a store that is gone may hold it


class Pulse:
    """What one rank tells the others, and when it last heard of them."""

    def __init__(self, world: World) -> None:
        self.over = threading.Event()
        self._rank = world.rank
        self._before = (world.rank - 1) % world.size
        # A launcher that starts ranks again keeps its store.
        self._prefix = f"align/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store_answered = self._beat_changed = time.monotonic()
        self._has_met = False
        self._count = 0  # the beats of the rank before this one

    def beat(self) -> None:
        """Talks to the store; while that is away it asks again, and `watch` counts the time."""
        store = None
        while not self._is_over_after_nap("_beat_changed"):
            try:
                # A connection of its own: another thread may hold the usual one for long.
                store = store or _STORE(*self._place, None, False, _ANSWER)
                self._exchange(store)
                self._store_answered, self._has_met = time.monotonic(), True
            except (RuntimeError, ValueError):  # torch's errors of connections are RuntimeErrors
                store = None
        if store is not None:
            self._leave(store)

    def watch(self) -> None:
        """Looks at the clock alone, so that nothing can keep it."""
        while not self._is_over_after_nap("_store_answered"):
            if time.monotonic() - self._store_answered <= LOST_SECONDS:
                continue
            place = "the store at {}:{}".format(*self._place)
            if self._has_met:
                self._end(self._lost(place))
            logger.warning("Rank %d cannot reach %s: no lost rank is noticed.", self._rank, place)
            return

    def _is_over_after_nap(self, clock: str) -> bool:
        """Waits a little; who was stopped meanwhile, as by Ctrl-Z, knows nothing of that time."""
        began = time.monotonic()
        is_over = self.over.wait(BEAT_SECONDS)
        if (slept := time.monotonic() - began) > LOST_SECONDS / 4:
            setattr(self, clock, getattr(self, clock) + slept)
        return is_over

    def _exchange(self, store: Any) -> None:
        store.add(f"{self._prefix}/beat/{self._rank}", 1)
        count, now = store.add(f"{self._prefix}/beat/{self._before}", 0), time.monotonic()
        if count != self._count or store.check([f"{self._prefix}/left/{self._before}"]):
            self._count, self._beat_changed = count, now
        if self._count and now - self._beat_changed > LOST_SECONDS:
            said = self._lost(f"rank {self._before}")
            store.set(f"{self._prefix}/lost", said)
            self._end(said)
        if store.check([f"{self._prefix}/lost"]):
            self._end(store.get(f"{self._prefix}/lost").decode())

    def _leave(self, store: Any) -> None:
        try:
            store.set(f"{self._prefix}/left/{self._rank}", "")
        except RuntimeError:  # its host left first
            return

    def _lost(self, who: str) -> str:
        return (
            f"Rank {self._rank} has not heard of {who} for {LOST_SECONDS:.0f} s: a machine or the "
            "network is gone. Start all ranks again with --resume auto."
        )

    def _end(self, said: str) -> None:
        if self.over.is_set():
            return
        sys.stderr.write(f"error: {said}\n")
        sys.stderr.flush()
        # The rank waits in a collective that nothing interrupts.
        os._exit(PeerError.exit_code)
