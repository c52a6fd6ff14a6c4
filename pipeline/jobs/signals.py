"""Signals during training: the first asks it to save and stop, the same again ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...schemas.errors import Interrupted

logger = logging.getLogger("align")

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Variables that launchers set for their ranks: torchrun, deepspeed, srun.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE", "SLURM_STEP_ID")
SECONDS_PER_LOOK = 1.0
RESUME = "Continue with the same command and --resume auto"
STOPPING = (
    "signal %d: the run finishes this step, saves a checkpoint and stops. The same signal again "
    "ends it at once and loses the steps since the last checkpoint."
)


@contextmanager
def add_resume_hint() -> Iterator[None]:
    """Adds the resume command to an Interrupted of the block."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, RESUME, at=stop.at) from None


def stop_signals() -> list[signal.Signals]:
    """The signals that ask to stop; under nohup, without the one of a closing terminal."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOPS if not (ignores_hangup and number is signal.SIGHUP)]


def stop_with_launcher() -> None:
    """Asks this rank to stop once its launcher has ended."""
    if any(name in os.environ for name in LAUNCHED):
        # A fork does not copy threads, so workers of this process have no watcher.
        threading.Thread(target=_outlive, args=(os.getppid(),), daemon=True).start()


def _outlive(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(SECONDS_PER_LOOK)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # otherwise already asked to stop
        logger.warning("The launcher, process %d, has ended: this rank stops too.", launcher)
        os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __call__(self) -> bool:
        """Whether this process was asked to stop."""
        return bool(self.signal_number)


@contextmanager
def asked_to_stop(say: Callable[[str], None] = lambda line: None) -> Iterator[StopRequest]:
    """Records signals instead of acting on them while the block runs.

    A handler calls `say` with what the first one does, because a step may take minutes.
    """
    asked = StopRequest()

    def note(number: int, _: Any) -> None:
        is_first = not asked()  # a launcher may send another one after the terminal's
        asked.signal_number = number
        signal.signal(number, signal.SIG_DFL)
        if is_first:
            say(STOPPING % number)

    # Only a main thread can handle signals, not for example a Ray worker's thread.
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in (stop_signals() if is_main else ())}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
