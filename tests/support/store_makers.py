"""Processes that make a store of MLflow and may be killed at it; they need not import anything.

As a program it reads requests and writes answers, one JSON object a line.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def store_makers():
    """A process that forks makers."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(**request):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main():
    """Obeys line by line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401, PLC0415

    for line in sys.stdin:
        answers.write(json.dumps(obey(json.loads(line))) + "\n")
        answers.flush()


def obey(request):
    """Lets so many processes make one store at once; kills them after a while, if asked to."""
    started = time.perf_counter()
    pids = [fork(request["uri"]) for _ in range(request["makers"])]
    if request.get("kill_after") is not None:
        time.sleep(request["kill_after"])
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "seconds": time.perf_counter() - started}


def fork(uri):
    """A process that records one run, and nothing else."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        from align.schemas.config import TrackingOptions  # noqa: PLC0415
        from align.stages.tracking.journaled_run import recorded  # noqa: PLC0415

        random.seed()
        options = TrackingOptions(uri=uri)
        with (
            tempfile.TemporaryDirectory() as home,
            recorded(options, Path(home), "x", is_recorded=True) as run,
        ):
            code = 0 if run.run_id else 3
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
