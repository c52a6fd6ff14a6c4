"""Runs a server in its own process group, and ends the group when standard input closes.

align holds the other end of that pipe. The system closes it however align ends, even by SIGKILL,
so no server outlives align. A signal to this program ends the group too. It imports nothing of
align, because it must start fast and stay small.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE = 10  # seconds from SIGTERM to SIGKILL


def main() -> int:
    """Runs the command of the arguments; returns its exit code."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def send(number: int) -> None:
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(server.pid, number)

    def end_group() -> None:
        send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE)
        send(signal.SIGKILL)

    def end_with_align() -> None:
        os.read(0, 1)  # the lock of sys.stdin would block the exit of this program
        end_group()

    def end_on_signal(*_: object) -> None:
        # In a thread, because `server.wait` of a signal handler would never return.
        threading.Thread(target=end_group, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end_on_signal)
    threading.Thread(target=end_with_align, daemon=True).start()
    code = server.wait()
    send(signal.SIGKILL)  # children that the server left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
