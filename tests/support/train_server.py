"""A process that has imported everything, and forks commands of `align` that start at once.

It reads requests and writes answers, one JSON object a line.
"""

import gc
import json
import os
import sys
import time
from contextlib import nullcontext

import torch

from support.file_trace import traced

REQUESTS = os.fdopen(os.dup(0), "r")
ANSWERS = os.fdopen(os.dup(1), "w")


def main():
    """Forks and waits as it is asked to, until nobody asks any more."""
    import_everything()
    gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine
    answer({"pid": os.getpid()})
    for line in REQUESTS:
        request = json.loads(line)
        if "wait" in request:
            answer({"code": wait(request["wait"], request["seconds"])})
            continue
        pid = os.fork()
        if not pid:
            become(request)
            return
        answer({"pid": pid})


def import_everything():
    """What stage 1 and stage 2 import, down to what they import late."""
    import mlflow  # noqa: F401, PLC0415
    import peft  # noqa: F401, PLC0415
    from transformers.models.llama import modeling_llama  # noqa: F401, PLC0415

    from align.pipeline import precompute, train, training_job  # noqa: F401, PLC0415
    from align.stages.tracking import progress  # noqa: F401, PLC0415


def answer(plain):
    """One line."""
    ANSWERS.write(json.dumps(plain) + "\n")
    ANSWERS.flush()


def wait(pid, seconds):
    """How the process ended, a signal as a negative number; None when it is not over by then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def become(request):
    """Turns this process into one that was given a command."""
    from align import cli  # noqa: PLC0415

    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if threads := request["env"].get("OMP_NUM_THREADS"):  # torch has read it already
        torch.set_num_threads(int(threads))
    for number, name in ((1, "out"), (2, "err")):
        sink = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, number)
        os.close(sink)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.argv = ["align", *request["argv"]]
    with traced(**request["traced"]) if request["traced"] else nullcontext():
        cli.main()


if __name__ == "__main__":
    main()
