"""Runs a command in a process group of its own, and ends the group when standard input ends.

align holds the other end of that pipe, and the system closes it however align ends, also by a
SIGKILL: no server is left. A signal to this program ends the group as well. A program by itself,
without any import of align.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE = 10  # seconds from SIGTERM to SIGKILL


def main() -> int:
    """The exit code of the command."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end(number: int) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(server.pid, number)

    def end_all() -> None:
        end(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE)
        end(signal.SIGKILL)

    def end_with_align() -> None:
        os.read(0, 1)  # not by sys.stdin, whose lock would hold up the end of this program
        end_all()

    def end_by_signal(*_: object) -> None:
        threading.Thread(target=end_all, daemon=True).start()  # here `server.wait` would not return

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end_by_signal)
    threading.Thread(target=end_with_align, daemon=True).start()
    code = server.wait()
    end(signal.SIGKILL)  # children that it left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
