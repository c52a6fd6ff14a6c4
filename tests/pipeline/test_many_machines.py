"""Launchers of many machines, played on one: late agents, dying workers, srun, hostfiles, Ray."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from align.pipeline import resume
from align.schemas.errors import UsageError
from align.stages.storage.locks import owner_lock
from align.stages.storage.run_folder import RunFolder
from support.patience import PATIENCE
from support.rooms import ROOT
from support.rounding import EPSILON, NATS, apart
from support.trainings import distances, require_same, saved, weights

BIN = Path(sys.executable).parent
AUTO, TWO = ("--resume", "auto"), ("--deepspeed", "zero2")


@pytest.fixture
def meeting_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def begin(course, program, *more, failpoint=""):
    """Begins one machine's launcher."""
    return subprocess.Popen(
        list(map(str, (*program, *more))),
        cwd=course.folder,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "ALIGN_HOME": str(course.folder), "ALIGN_FAILPOINTS": failpoint}
        | {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*launchers):
    """What each of them said, once all have ended well."""
    said = [launcher.communicate(timeout=PATIENCE)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * len(launchers), said
    return said


def torchrun(nodes, port):
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", port)
    restarts = ("--nproc-per-node", 1, "--max-restarts", 3)
    return (BIN / "torchrun", "--nnodes", nodes, *restarts, *place, "-m", "align")


def until(launcher, *patterns):
    """Reads on until each of these was said, one after the other."""
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in launcher.stderr), pattern


def test_a_worker_that_dies_is_started_again_and_a_launcher_that_is_stopped_leaves_a_checkpoint(
    course, tmp_path
):
    """The ranks of torchrun and those that go on from them do not even hash words alike."""
    run, longer = tmp_path / "run", (*TWO, "--max-steps", 30, "--epochs", 9, "--eval-every", 0)
    place = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 3, "-m", "align")
    launcher = begin(course, (BIN / "torchrun", *place, *course.arguments(run, *longer, *AUTO)))
    until(launcher, r"step \d+:")
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    until(launcher, "lost another rank", r"step \d+:")
    launcher.send_signal(signal.SIGTERM)
    (_, said), code = launcher.communicate(timeout=PATIENCE), launcher.returncode
    assert code != 0
    assert "error: Interrupted by signal 15" in said
    assert saved(run)[0] < 30
    course.run(run, *longer, *AUTO, ranks=2)
    require_same(run, course.whole(*longer, ranks=2))


@pytest.mark.long
def test_a_machine_that_comes_late_and_loses_its_worker_is_waited_for(
    course, tmp_path, meeting_port
):
    run = tmp_path / "run"
    words = (*torchrun(2, meeting_port), *course.arguments(run, *AUTO))
    first = begin(course, words)
    time.sleep(2)
    said = ended(first, begin(course, words, failpoint="step.before_update=kill@4"))
    assert "lost another rank" in said[0] + said[1]
    assert "continuing after step 2" in said[0] + said[1]
    require_same(run, course.whole(ranks=2))


@pytest.mark.long
def test_a_run_goes_on_over_the_machines_that_are_left(course, tmp_path, meeting_port):
    run = tmp_path / "run"
    long = ("--epochs", 5, "--max-steps", 60, "--set", "train.dropout=false")
    words = (*torchrun("1:2", meeting_port), *course.arguments(run, *long, *AUTO))
    first = begin(course, words)
    time.sleep(3)  # whose agent is first keeps the place where they meet
    second = begin(course, words)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or '"step":9' not in metrics.read_text():
        assert first.poll() is None
        time.sleep(0.1)
    (worker,) = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    for process in (second.pid, int(worker)):  # the whole machine
        os.kill(process, 9)
    second.communicate()
    (said,) = ended(first)
    assert ": ranks 2 → 1\n" in said
    assert saved(run) == (60, 1, 0)
    whole, limits = course.whole(*long), {"losses": NATS, "weights": apart(60 * 1e-3)}
    assert all(far <= limits[what] for what, far in distances(run, whole).items())


@pytest.mark.long
def test_deepspeeds_launcher_reads_a_hostfile_and_is_started_on_each_machine(
    course, tmp_path, meeting_port
):
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    place = ("--no_ssh", "--master_addr", "127.0.0.1", "--master_port", meeting_port)
    words = (BIN / "deepspeed", "--hostfile", hosts, *place)
    align = ("--module", "align", *course.arguments(run))
    ended(*(begin(course, (*words, "--node_rank", node, *align)) for node in range(2)))
    assert weights(run) == weights(course.whole(ranks=2))


def test_tasks_of_srun_are_ranks(course, tmp_path):
    """The environment that srun gives two tasks on two machines."""

    def srun(rank, port):
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        nodes = {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "MASTER_PORT": port}
        return {**step, **nodes, "SLURM_PROCID": rank, "SLURM_LOCALID": 0}

    run = tmp_path / "run"
    answers = course.start(run, ranks=2, launcher=srun).answers()
    assert [answer.code for answer in answers] == [0, 0], answers
    assert weights(run) == weights(course.whole(ranks=2))


@pytest.mark.long
def test_workers_of_ray_train_are_ranks(course, tmp_path):
    run = tmp_path / "run"
    settings = {
        "train.batch_size": 4,
        "train.max_steps": 6,
        "train.lr": 1e-3,
        "train.epsilon": EPSILON,
        "train.eval_fraction": 0.1,
        "train.eval_every": 3,
        "train.dropout": "true",
        "tracking.mlflow": "false",
    }
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words = (sys.executable, ROOT / "examples" / "ray_train.py", "--cache", course.cache)
    ended(begin(course, words, "--output", run, "--method", "kto", "--workers", 2, *sets))
    assert saved(run) == (6, 2, 1)
    assert weights(run) == weights(course.whole(ranks=2))


def test_a_folder_of_another_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SHARED_SECONDS", 0.1)
    folders = [RunFolder(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        folder.prepare()
    with owner_lock(folders[0], "cafe"):
        resume.require_shared(folders[0], "cafe")
        for folder, run_id in ((folders[1], "cafe"), (folders[0], "beef")):
            with pytest.raises(UsageError, match="is not the folder that rank 0 writes to"):
                resume.require_shared(folder, run_id)
