"""Commands of `align` in processes of their own: quick to start, easy to kill."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock

from align.stages.report.row_margins import read_margins
from align.stages.storage.run.run_folder import RunFolder
from support import disk_faults
from support.checkpoint_saves import chosen_in
from support.command import Answer
from support.patience import PATIENCE
from support.refusals import require_names
from support.rooms import TESTS
from support.rounding import EPSILON

KILLED = -signal.SIGKILL


@contextmanager
def fork_server(shared):
    """The address of the process that forks commands for all workers: the first starts it."""
    place, process = shared / "fork-server", None
    with FileLock(f"{place}.lock"):
        if not place.exists():
            # Not pytest's own folder, whose path may be too long for the name of a socket.
            address = Path(tempfile.mkdtemp(prefix="align-fork-")) / "socket"
            process = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server", address],
                cwd=TESTS,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout.readline() == "ready\n"
            place.write_text(str(address))
    yield place.read_text()
    if process:
        with FileLock(f"{place}.lock"):
            place.unlink()
            process.stdin.close()
        process.wait(PATIENCE)
        process.stdout.close()
        shutil.rmtree(address.parent)


class Server:
    """Forks processes that need not import anything."""

    def __init__(self, home, address):
        self._home = home
        self._count = 0
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            self._stream = client.makefile("rw")

    def start(self, *arguments, cwd=None, ranks=1, faults=(), launcher=None, **more):
        """Starts a command on several ranks; `faults` are those of rank 0, rank 1, …

        `launcher` returns the environment of a rank from its number and a free port; the default is
        torchrun's. The fork server reads all other arguments.
        """
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            port = door.getsockname()[1]
        world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = []
        for rank in range(ranks):
            environment = {**world, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            if launcher:
                environment = launcher(rank, port)
            plain = {name: str(value) for name, value in environment.items()}
            plain[disk_faults.VARIABLE] = dict(enumerate(faults)).get(rank, "")
            processes.append(self.fork(arguments, cwd, plain, **more))
        return Training(tuple(processes))

    def run(self, *arguments, **how):
        """Runs a command to its end; returns the answer of its first rank."""
        return self.start(*arguments, **how).answers()[0]

    def success(self, *arguments, **how):
        """Gives a command that must succeed."""
        answer = self.run(*arguments, **how)
        assert answer.code == 0, answer
        return answer

    def fork(self, arguments, cwd, environment, **more):
        """Starts a command in one process."""
        self._count += 1
        out, err = (self._home / f"{self._count}.{name}" for name in ("out", "err"))
        request = {
            "argv": list(map(str, arguments)),
            "cwd": str(cwd or self._home),
            "env": {"ALIGN_HOME": str(self._home), **environment},
            "out": str(out),
            "err": str(err),
            **more,
        }
        return Process(self, out=out, err=err, **self._ask(request))

    def wait(self, pid, seconds):
        """The exit code of a process; None if it still runs after so many seconds."""
        return self._ask({"wait": pid, "seconds": seconds})["code"]

    def close(self):
        self._stream.close()

    def _ask(self, request):
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())


@dataclass(frozen=True)
class Process:
    """One rank."""

    server: Server
    pid: int
    out: Path
    err: Path
    launcher: int = 0  # the process that started it, where it has one of its own

    def answer(self):
        """Waits for its end; kills a process that does not end."""
        code = self.server.wait(self.pid, PATIENCE)
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.server.wait(self.pid, PATIENCE)
        return Answer(code, self.out.read_text(), self.err.read_text())


@dataclass(frozen=True)
class Training:
    """All ranks of one command."""

    processes: tuple[Process, ...]

    def answers(self):
        return [process.answer() for process in self.processes]

    def signal(self, number):
        """Sends a signal to all ranks, as a launcher does."""
        for process in self.processes:
            os.kill(process.pid, number)

    def until(self, said):
        """Waits until the first rank has written a text and still runs."""
        first = self.processes[0]
        while not first.err.exists() or said not in first.err.read_text():
            assert first.server.wait(first.pid, 0.02) is None, first.err.read_text()


@dataclass(frozen=True)
class Person:
    """A user who runs commands in a folder of his own."""

    server: Server
    folder: Path
    environment: dict

    @property
    def home(self):
        return self.folder / "home"

    def tries(self, *words, faults=""):
        """Runs a command to its end."""
        return self.starts(*words, faults=faults).answer()

    def starts(self, *words, faults=""):
        """Starts a command."""
        more = {"ALIGN_HOME": str(self.home), disk_faults.VARIABLE: faults}
        return self.server.fork(words, self.folder, {**self.environment, **more})

    def gives(self, *words):
        """Runs a command that must succeed."""
        answer = self.tries(*words)
        assert answer.code == 0, answer
        return answer


@dataclass(frozen=True)
class Course:
    """A cache, and short runs over it that differ in their options."""

    server: Server
    folder: Path
    known: dict = field(default_factory=dict)  # uninterrupted runs by their options

    # Six steps with all that could be lost between two of them: dropout, KL completions.
    SHORT = (
        *("--method", "kto", "--batch-size", 4, "--max-steps", 6, "--lr", 1e-3),
        *("--eval-fraction", 0.1, "--eval-every", 3, "--save-every", 2, "--no-mlflow"),
        *("--set", "train.dropout=true", "--set", f"train.epsilon={EPSILON}"),
        *("--set", "train.row_margins=true"),
    )

    @property
    def cache(self):
        """A cache of sixty pairs."""
        return self.folder / "cache"

    @property
    def model(self):
        return self.folder / "model"

    def prepare(self, world):
        """Makes the reference and its cache."""
        shutil.copytree(world.model, self.model)
        config = json.loads((self.model / "config.json").read_text())
        text = json.dumps(config | {"attention_dropout": 0.1})
        (self.model / "config.json").write_text(text)
        made = ("--model", self.model, "--output", self.cache, "--shards", 8)
        self.server.success("precompute-ref", world.data.paired, *made, "--no-mlflow")

    def start(self, run, *more, **how):
        """Starts a short run in a folder."""
        return self.server.start(*self.arguments(run, *more), **how)

    def arguments(self, run, *more):
        """The command line of a short run; the last of two equal options counts."""
        return ("train", "--cache", self.cache, "--output", run, *self.SHORT, *more)

    def run(self, run, *more, **how):
        """A short run from its beginning to its end."""
        return self.server.success(*self.arguments(run, *more), **how)

    def ends(self, code, run, *more, fault=""):
        """A short run that ends with this code, where it meets a fault."""
        (answer,) = self.start(run, *more, faults=[fault]).answers()
        assert answer.code == code, answer
        return answer

    def whole(self, *more, ranks=1):
        """The folder of an uninterrupted run, made when it is first needed."""
        key = (*map(str, more), ranks)
        if key not in self.known:
            folder = self.folder / f"whole-{len(self.known)}"
            self.run(folder, *more, ranks=ranks)
            self.known[key] = folder
        return self.known[key]


def weights(run):
    """A digest of the trained weights."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def require_same(run, whole):
    """Requires two runs to have the same bits in weights, metrics and row margins."""
    assert weights(run) == weights(whole)
    assert learned(run) == learned(whole)
    tables = [read_margins(RunFolder(one).rows) for one in (run, whole)]
    assert tables[0].equals(tables[1])


def saved(run):
    """The step, the number of ranks and the ZeRO stage of the newest checkpoint."""
    checkpoint = chosen_in(RunFolder(run))
    identity = checkpoint.identity
    return checkpoint.state.step, identity.world_size, identity.zero_stage


def distances(run, whole):
    """The largest difference of losses and of weights."""
    found, expected = (
        {line["step"]: line["loss"] for line in learned(one) if "loss" in line}
        for one in (run, whole)
    )
    assert found.keys() == expected.keys()
    (stored,) = {path.name for path in (whole / "model").glob("*model.safetensors")}
    from safetensors.torch import load_file  # noqa: PLC0415  it imports torch

    one, other = (load_file(folder / "model" / stored) for folder in (run, whole))
    assert one.keys() == other.keys()
    losses = [abs(found[step] - loss) for step, loss in expected.items()]
    weights = [float((one[name].double() - other[name]).abs().max()) for name in one]
    # Python's own `max` may pass over NaN.
    far = {"losses": float(np.max(losses)), "weights": float(np.max(weights))}
    print(run.name, far)
    return far


def refused(course, code, run, *more, ranks=1, names=()):
    """Runs a command that every rank must refuse alike without a change; returns its message.

    The message must contain all `names`.
    """
    from support.stage_one import contents  # noqa: PLC0415  it imports stage 1

    before = contents(run)
    answers = course.start(run, *more, ranks=ranks).answers()
    assert [answer.code for answer in answers] == [code] * ranks, answers
    assert "Traceback" not in "".join(answer.out + answer.err for answer in answers)
    assert len({answer.err.partition("error: ")[2] for answer in answers}) == 1, answers
    assert contents(run) == before
    require_names(answers[0].err, *names)
    return answers[0].err


def learned(run):
    """The metrics of each line that do not depend on the machine and its load."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    of_today = ("time", "speed/", "memory/")
    return [{name: line[name] for name in line if not name.startswith(of_today)} for line in lines]
