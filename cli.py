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
from .pipeline.commands.terminal import echo
from .pipeline.jobs.signals import stop_signals, stop_with_launcher
from .pipeline.workers import HOW_THREADS_WAIT
from .schemas.errors import AlignError, Interrupted, PeerError, unexpected_os_error
from .schemas.safe_text import mask_secrets_of, safe
from .stages.engine.freed_blocks import give_large_blocks_back
from .stages.tracking.mlflow_silence import ENVIRONMENT, NOISY

# A waiting OpenMP thread that spins takes the core of another thread, often of the one that it
# waits for. A thread that sleeps at once is late for the next of many short tasks. So it spins for
# a tenth of a millisecond at most. Only libgomp reads the second variable.
SHORT_SPINS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def main() -> None:
    """Runs one command; a user error is one message without a traceback."""
    own_process(sys.argv)
    stop_with_launcher()
    for number in stop_signals():
        signal.signal(number, _stop)
    try:
        # The deepspeed launcher adds the rank to the command, although LOCAL_RANK has it too.
        words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
        app(words, prog_name="align")
    except PeerError as error:
        echo(f"error: {error}", err=True)
        # The threads of the lost collective still run, and a normal exit would abort on them.
        os._exit(error.exit_code)
    except (AlignError, Interrupted) as error:
        _fail(error)
    except BrokenPipeError:  # the process that reads the output has ended
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(unexpected_os_error(error))
    except Exception:
        # Python's own traceback would show secrets.
        echo(traceback.format_exc().rstrip(), err=True)
        sys.exit(1)
    finally:
        # Code that runs at Python's exit would print an Interrupted and continue.
        for number in stop_signals():
            if signal.getsignal(number) is _stop:  # otherwise a second signal ends the process
                signal.signal(number, _end)


def own_process(arguments: Sequence[str]) -> None:
    """Applies process-wide settings, which `import align` as a library must not change."""
    # Imports create millions of objects and no garbage; `begin_work` enables the collector.
    gc.disable()
    # transformers would download code for some layers from the Hub and run it.
    os.environ["USE_HUB_KERNELS"] = "0"
    # Arrow reads this at its import. Its own pool would keep freed memory that torch cannot use;
    # the system's allocator shares it.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    give_large_blocks_back()
    # OpenMP reads this when torch is imported.
    if not any(name in os.environ for name in HOW_THREADS_WAIT):
        os.environ.update(SHORT_SPINS)
    if not sys.stderr.isatty():  # it draws bars into files too
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # MLflow reads them when DeepSpeed imports it
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
    echo(f"error: {error}", err=True)
    sys.exit(error.exit_code)
