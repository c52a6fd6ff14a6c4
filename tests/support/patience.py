"""How long tests wait for what is to happen."""

import time

PATIENCE = 1000  # seconds, of what hangs alone: a machine that does much else beside it is slow


def wait_until(holds):
    """Returns when something has come true that has to."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
