"""Launchers of several machines, on one machine: late agents, killed workers, hostfiles, Ray."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from align.pipeline.train import resume
from align.schemas.errors import UsageError
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.run.run_folder import RunFolder
from support.patience import PATIENCE
from support.refusals import refuses
from support.rooms import ROOT
from support.rounding import EPSILON, NATS, apart
from support.trainings import distances, require_same, saved, weights

BIN = Path(sys.executable).parent
AUTO, TWO = ("--resume", "auto"), ("--deepspeed", "zero2")


def begin(course, program, *more):
    """Starts the launcher of one machine."""
    return subprocess.Popen(
        list(map(str, (*program, *more))),
        cwd=course.folder,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "ALIGN_HOME": str(course.folder)}
        | {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*launchers):
    """Requires all launchers to succeed; returns what each wrote."""
    said = [launcher.communicate(timeout=PATIENCE)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * len(launchers), said
    return said


def children(process):
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in pids]


def test_a_launcher_that_is_stopped_leaves_a_checkpoint(course, tmp_path):
    """The ranks of torchrun and those that resume differ in how Python hashes words."""
    run, longer = tmp_path / "run", (*TWO, "--max-steps", 16, "--epochs", 9, "--eval-every", 0)
    place = ("--standalone", "--nproc-per-node", 2, "-m", "align")
    launcher = begin(course, (BIN / "torchrun", *place, *course.arguments(run, *longer, *AUTO)))
    assert any("step 1:" in line for line in launcher.stderr)
    launcher.send_signal(signal.SIGTERM)
    (_, said), code = launcher.communicate(timeout=PATIENCE), launcher.returncode
    assert code != 0
    assert "signal 15" in said
    assert saved(run)[0] < 16
    course.run(run, *longer, *AUTO, ranks=2)
    require_same(run, course.whole(*longer, ranks=2))


@pytest.mark.long
def test_machines_may_come_late_and_be_lost(course, tmp_path):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    run = tmp_path / "run"
    long = ("--epochs", 5, "--max-steps", 60, "--set", "train.dropout=false")
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", port)
    how = ("--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3, *place, "-m", "align")
    words = (BIN / "torchrun", *how, *course.arguments(run, *long, *AUTO))
    first = begin(course, words)
    time.sleep(3)  # the first agent keeps the rendezvous
    second = begin(course, words)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or '"step":9' not in metrics.read_text():
        assert first.poll() is None
        time.sleep(0.1)
    for pid in (second.pid, *children(second)):  # the whole machine
        os.kill(pid, signal.SIGKILL)
    second.communicate()
    (said,) = ended(first)
    assert "ranks 2 → 1" in said
    assert saved(run) == (60, 1, 0)
    whole, limits = course.whole(*long), {"losses": NATS, "weights": apart(60 * 1e-3)}
    assert all(far <= limits[what] for what, far in distances(run, whole).items())


@pytest.mark.long
def test_deepspeeds_launcher_and_ray_train_start_ranks_too(course, tmp_path):
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("127.0.0.1 slots=2\n")
    words = (BIN / "deepspeed", "--hostfile", hosts, "--no_ssh", "--node_rank", 0)
    place = ("--master_addr", "127.0.0.1", "--module", "align")
    ended(begin(course, words, *place, *course.arguments(run)))
    assert weights(run) == weights(course.whole(ranks=2))
    settings = ("batch_size=4", "max_steps=6", "lr=1e-3", f"epsilon={EPSILON}", "dropout=true")
    measured = ("eval_fraction=0.1", "eval_every=3")
    named = [f"train.{one}" for one in (*settings, *measured)]
    sets = [word for one in (*named, "tracking.mlflow=false") for word in ("--set", one)]
    words = (sys.executable, ROOT / "examples" / "ray_train.py", "--cache", course.cache)
    run = tmp_path / "by-ray"
    ended(begin(course, words, "--output", run, "--method", "kto", "--workers", 2, *sets))
    assert saved(run) == (6, 2, 1)
    assert weights(run) == weights(course.whole(ranks=2))


def test_a_folder_of_another_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SHARED_SECONDS", 0.1)
    folders = [RunFolder(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        folder.prepare()
    with owner_lock(folders[0].root, "cafe"):
        resume.require_shared(folders[0], "cafe")
        for folder, run_id in ((folders[1], "cafe"), (folders[0], "beef")):
            with refuses(UsageError, folder.root, "--output"):
                resume.require_shared(folder, run_id)
