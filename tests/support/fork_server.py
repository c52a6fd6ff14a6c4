"""A process that has imported everything, and forks commands of `align` that start at once.

It serves each client in a fork of its own. Requests and answers are one JSON object a line.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

# Linux constants without a name in Python 3.11.
SET_CHILD_SUBREAPER, NEW_MOUNTS, NEW_USER = 36, 0x20000, 0x10000000
# All imports of both stages, late ones of libraries too: each fork would repeat them.
IMPORTED = (
    *("align.cli", "align.pipeline.precompute.precompute", "align.pipeline.train.train"),
    *("align.pipeline.train.trained_model", "align.pipeline.train.run_report"),
    *("align.stages.tracking.progress", "peft.tuners.lora.bnb", "deepspeed.runtime.zero.muon"),
    *("deepspeed.module_inject.auto_ep_layer", "transformers.models.llama.modeling_llama"),
    *("mlflow.store.tracking.sqlalchemy_workspace_store", "git", "jinja2.debug", "rich.console"),
    *("align.stages.tracking.mlflow_tracker", "alembic.command", "sqlalchemy.dialects.sqlite"),
)


def main(address):
    """Waits for clients until the process that started this one closes its standard input."""
    import_everything()
    gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine
    with socket.socket(socket.AF_UNIX) as door, selectors.DefaultSelector() as ready:
        door.bind(address)
        door.listen()
        print("ready", flush=True)
        for source in (door, sys.stdin):
            ready.register(source, selectors.EVENT_READ)
        while door in [key.fileobj for key, _ in ready.select()]:
            client, _ = door.accept()
            if not os.fork():
                serve(client.makefile("rw"))
                return
            client.close()


def serve(client):
    """Forks and waits for a client until it closes its connection."""
    for line in client:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": wait(request["wait"], request["seconds"])}
        else:
            answer = launched(request) if "has_launcher" in request else {"pid": forked(request)}
        client.write(json.dumps(answer) + "\n")
        client.flush()


def import_everything():
    """Makes the patterns of names too that transformers makes for its first model."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")


def wait(pid, seconds):
    """The exit code of a process, a signal as a negative number; None if it still runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):  # its launcher lives
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    return None


def forked(request):
    """A process that becomes a command."""
    pid = os.fork()
    if not pid:
        become(request)
    return pid


def launched(request):
    """Forks a launcher that forks it; orphans become children of this process."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reads, writes = os.pipe()
    launcher = os.fork()
    if not launcher:
        os.write(writes, str(forked(request)).encode())
        signal.pause()
    pid = int(os.read(reads, 20))
    os.close(reads)
    os.close(writes)
    return {"pid": pid, "launcher": launcher}


def become(request):
    """Turns this process into a command, or into another program of this folder.

    At its end Python's exit functions run, but modules stay: taking them down takes half a second.
    """
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if threads := request["env"].get("OMP_NUM_THREADS"):  # torch has read it already
        torch.set_num_threads(int(threads))
    if any(name.startswith("HF_") for name in request["env"]):  # so has huggingface_hub
        importlib.reload(importlib.import_module("huggingface_hub.constants"))
    for number, name in ((1, "out"), (2, "err")):
        sink = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, number)
        os.close(sink)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.argv = ["align", *request["argv"]]
    code = 0
    try:
        with meanwhile(request):
            importlib.import_module(request.get("program", "align.cli")).main()
    except SystemExit as end:
        code = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def meanwhile(request):
    """Gives the command disk faults, or a small disk."""
    with ExitStack() as stack:
        if faults := request["env"].get("DISK_FAULTS"):
            importlib.import_module("support.disk_faults").arm(faults)
        if "disk" in request:
            stack.enter_context(small_disk(**request["disk"]))
        yield


@contextmanager
def small_disk(folder, size, kept):
    """A disk of this size that only this process sees; its files are copied at the end."""
    libc = ctypes.CDLL(None, use_errno=True)
    mine = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    assert libc.unshare(NEW_USER | NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    for name, text in mine.items():
        Path("/proc/self", name).write_text(text)
    disk = (b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={int(size)}".encode())
    assert libc.mount(*disk) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        shutil.copytree(folder, kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
