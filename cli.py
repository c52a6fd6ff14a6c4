"""The command line: its commands by group, signals, and the end of a command that fails."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import typer

from .pipeline.commands import (
    cache_commands,
    look_commands,
    round_commands,
    setup_commands,
    train_commands,
)
from .pipeline.commands.terminal import SafeGroup, Version, own_process, say
from .pipeline.jobs.signals import stop_signals, stop_with_launcher

app = typer.Typer(
    name="align",
    cls=SafeGroup,
    help="Preference alignment in two stages: score the reference once, then train at will.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs one command; a person's mistake is one message, never a traceback."""
    from .schemas.errors import AlignError, Interrupted, PeerError, unexpected_os_error

    # transformers would fetch code for some layers from the Hub, and run it.
    os.environ["USE_HUB_KERNELS"] = "0"
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
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of the output has ended
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(str(refusal := unexpected_os_error(error)), refusal.exit_code)
    except Exception:
        import traceback

        # Python would print it by itself, and the secrets in it.
        say(traceback.format_exc().rstrip(), err=True)
        sys.exit(1)
    finally:
        # What runs while Python ends would print an Interrupted and go on.
        for number in stop_signals():
            if signal.getsignal(number) is _stop:  # else a second one ends it anyway
                signal.signal(number, _end)


@app.callback()
def about(version: Version = False) -> None:
    """Takes what is asked of no command."""


for group in (setup_commands, cache_commands, round_commands, train_commands, look_commands):
    app.add_typer(group.app)


def _stop(signal_number: int, _: Any) -> NoReturn:
    from .schemas.errors import Interrupted

    # A second signal must end the program at once, in any state.
    signal.signal(signal_number, signal.SIG_DFL)
    raise Interrupted(signal_number)


def _end(signal_number: int, _: Any) -> NoReturn:
    os._exit(128 + signal_number)


def _fail(message: str, exit_code: int) -> NoReturn:
    say(f"error: {message}", err=True)
    sys.exit(exit_code)
