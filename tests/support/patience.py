"""How long tests wait."""

import time

PATIENCE = 1000  # seconds; only a hang takes so long, even on a busy machine


def wait_until(holds):
    """Waits until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
