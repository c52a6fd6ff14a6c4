"""`transformers serve`, of the same installation, on loopback and without a network."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

MOST_SECONDS = 240  # to import everything, on a busy machine


@contextmanager
def transformers_server(model, folder):
    """The address of a server that has one model: a local folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # It lists what is in the hub's cache, and fails where there is none.
    (folder / "hub").mkdir()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait(process, port, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def _wait(process, port, log):
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())
