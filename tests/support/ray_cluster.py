"""A Ray cluster of this machine, on loopback, that tests connect to; and what is left of one."""

import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from support.patience import PATIENCE
from support.programs import TESTS

# Else Ray looks for the cluster at the address by which other machines reach this one.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # else a cluster takes 30 s to end


@dataclass(frozen=True)
class Cluster:
    """A cluster, by the process that began it."""

    address: str
    process: psutil.Process

    def actors(self):
        """The processes that make tasks just now."""
        return [one for one in descendants(self.process) if "MapWorker" in name_of(one)]


@contextmanager
def ray_cluster(folder):
    """Starts a cluster whose workers find the modules of this folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", port]
    words += ["--num-cpus", 2, "--include-dashboard", "false", "--disable-usage-stats"]
    words += ["--object-store-memory", 128 * 1024 * 1024, "--temp-dir", folder]
    found = filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *map(str, words)],
            env=os.environ | LOOPBACK | AT_ONCE | {"PYTHONPATH": os.pathsep.join(found)},
            stdout=said,
            stderr=said,
        )
    try:
        until(lambda: b"Ray runtime started" in (folder / "said").read_bytes())
        yield Cluster(f"127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        every = descendants(psutil.Process(process.pid))
        process.terminate()
        process.wait(PATIENCE)
        for one in every:  # by their ids: another cluster may run on this machine
            with suppress(psutil.NoSuchProcess):
                one.kill()


def descendants(process):
    """The children of a process, and theirs, as far as they live."""
    return [one for one in process.children(recursive=True) if one.is_running()]


def name_of(process):
    """What a process calls itself."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(happens):
    """Waits for something that has to happen."""
    end = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
