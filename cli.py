"""The command line: settings of its process, signals, and the end of a command that fails."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .pipeline.commands.commands import app
from .pipeline.commands.terminal import say
from .pipeline.jobs.signals import stop_signals, stop_with_launcher
from .pipeline.workers import HOW_THREADS_WAIT
from .schemas.errors import AlignError, Interrupted, PeerError, unexpected_os_error
from .schemas.safe_text import mask_secrets_of, safe
from .stages.engine.freed_blocks import give_large_blocks_back
from .stages.tracking.mlflow_silence import ENVIRONMENT, NOISY

# A thread that spins takes the core of whatever runs beside it, often of the very thread that it
# waits for; one that sleeps at once is late for the next of many short tasks. The spins, a tenth
# of a millisecond or less, are libgomp's own word; other libraries know the policy alone.
SOON_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def main() -> None:
    """Runs one command; a person's mistake is one message, never a traceback."""
    own_process(sys.argv)
    stop_with_launcher()
    for number in stop_signals():
        signal.signal(number, _stop)
    try:
        # The deepspeed launcher names the rank before the command; LOCAL_RANK holds it too.
        words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
        app(words, prog_name="align")
    except PeerError as error:
        say(f"error: {error}", err=True)
        # Threads of the lost collective are still there: the usual way out would abort on them.
        os._exit(error.exit_code)
    except (AlignError, Interrupted) as error:
        _fail(error)
    except BrokenPipeError:  # the reader of the output has ended
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(unexpected_os_error(error))
    except Exception:
        # Python would print it by itself, and the secrets in it.
        say(traceback.format_exc().rstrip(), err=True)
        sys.exit(1)
    finally:
        # What runs while Python ends would print an Interrupted and go on.
        for number in stop_signals():
            if signal.getsignal(number) is _stop:  # else a second one ends it anyway
                signal.signal(number, _end)


def own_process(arguments: Sequence[str]) -> None:
    """Applies the settings of the process; a library must not change its host."""
    # Imports make millions of objects and no garbage; `begin_work` ends this.
    gc.disable()
    # transformers would fetch code for some layers from the Hub, and run it.
    os.environ["USE_HUB_KERNELS"] = "0"
    # Arrow reads this when it is first imported. Its own pool keeps what was freed, beside what
    # torch then takes; the C library's gives both the same memory.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    give_large_blocks_back()
    # OpenMP reads this when torch is imported.
    if not any(name in os.environ for name in HOW_THREADS_WAIT):
        os.environ.update(SOON_ASLEEP)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # DeepSpeed imports MLflow, which reads them then
    # A thread may still send to MLflow when the program ends.
    for package in NOISY:
        warnings.filterwarnings("ignore", module=package)
    for word in arguments:
        mask_secrets_of(word.partition("=")[2] if "=" in word.partition("://")[0] else word)
    if logging.lastResort:  # Python's handler for records that no other handler takes
        logging.lastResort.setFormatter(SafeFormatter())


class SafeFormatter(logging.Formatter):
    """Log lines without secrets and terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, and its traceback."""
        return safe(super().format(record))


def _stop(signal_number: int, _: Any) -> NoReturn:
    # A second signal must end the program at once, in any state.
    signal.signal(signal_number, signal.SIG_DFL)
    raise Interrupted(signal_number)


def _end(signal_number: int, _: Any) -> NoReturn:
    os._exit(128 + signal_number)


def _fail(error: AlignError | Interrupted) -> NoReturn:
    say(f"error: {error}", err=True)
    sys.exit(error.exit_code)
