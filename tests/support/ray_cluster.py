"""A Ray cluster of two nodes on this machine, in a process of its own.

It prints its address, kills its second node for a line of input, and ends with its input.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from support.patience import PATIENCE

TESTS = Path(__file__).parents[1]
# Else Ray looks for the cluster at the address by which other machines reach this one.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
# So that its workers find the modules of the tests.
FOUND = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
KERNELS = {"USE_HUB_KERNELS": "1"}  # as on machines where the command does not run
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 128 * 1024 * 1024}
# Without processes that nothing here asks for; a lost node is noticed within three seconds.
HEAD = {
    **NODE,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "_system_config": {
        "prestart_worker_first_driver": False,
        "health_check_period_ms": 500,
    },
}


class TwoNodes:
    """The cluster, as who started it sees it."""

    def __init__(self, process):
        self._process = process
        self.address = process.stdout.readline().strip()
        assert self.address, "the cluster has not begun"

    def actors(self):
        """The processes of the actors that live."""
        return descendants(psutil.Process(self._process.pid), "_Actor")

    def kill_second_node(self):
        """Returns once it is gone."""
        print(file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "gone\n"


def descendants(process, named=""):
    """The children of a process, and theirs, as far as they live and have such a name."""
    found = process.children(recursive=True)
    return [one for one in found if one.is_running() and named in name_of(one)]


def name_of(process):
    """What a process calls itself."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def two_nodes():
    """The cluster, as long as the block runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.ray_cluster"],
        env=os.environ | LOOPBACK | KERNELS | {"PYTHONPATH": FOUND},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield TwoNodes(process)
    finally:
        every = descendants(psutil.Process(process.pid))
        process.stdin.close()
        process.wait(PATIENCE)
        process.stdout.close()
        for one in every:  # by their ids: another cluster may run on this machine
            with suppress(psutil.NoSuchProcess):
                one.kill()


def main():
    """The process of the cluster."""
    # Not pytest's own folder: its path is too long for the names of sockets.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        os.environ["RAY_TMPDIR"] = folder  # in which Ray expects its own folder
        Path(folder, "ray").mkdir()
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - it reads the environment

        first = {**HEAD, "temp_dir": f"{folder}/ray"}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        second = cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        for _ in sys.stdin:
            cluster.remove_node(second, allow_graceful=False)
            print("gone", flush=True)
        for node in (*cluster.worker_nodes, cluster.head_node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main()
