"""Signals while training: the first asks it to save and stop, a second ends it at once."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..schemas.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

STOPS = (signal.SIGTERM, signal.SIGINT)
WAY_ON = "Run the same command with --resume auto"


@contextmanager
def naming_the_way_on() -> Iterator[None]:
    """Whoever stops training is told how to go on with it."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, WAY_ON) from None


class Asked:
    """Whether somebody asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __call__(self) -> bool:
        """Whether somebody did."""
        return bool(self.signal_number)


@contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """Notes signals instead of acting on them, as long as the block runs."""
    asked = Asked()

    def note(number: int, _: Any) -> None:
        asked.signal_number = number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in STOPS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
