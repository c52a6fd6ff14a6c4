"""Asked to stop, training saves first; the next run resumes to the same bits."""

import json
import signal
import sys
from pathlib import Path

import pytest

from align.pipeline.train import stopped_at
from align.stages.storage.locks import owner_lock
from align.stages.storage.run_folder import RunFolder, read_ending
from support.command import start
from support.patience import PATIENCE
from support.tracked_training import run_of
from support.trainings import learned, weights

TWO = ("--deepspeed", "zero2")


def steps_saved(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def status(run, uri):
    """How MLflow says that a run ended."""
    record = json.loads((run / "_align" / "mlflow.json").read_text())
    return run_of(uri, record["run_id"]).info.status


def test_a_run_that_is_asked_to_stop_saves_and_resumes_to_the_same_bits(course, tmp_path):
    """The signal comes in the middle of step 3; the step is finished, then saved."""
    run, uri = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracked = ("--mlflow", "--set", f"tracking.uri={uri}", "--save-every", 0)
    stopped = course.start(run, *tracked, failpoints=["step.before_update=term@3"]).answers()[0]
    assert stopped.code == 143, stopped
    saved = run / "checkpoints" / "step-00000003"
    said = f"error: Interrupted by signal 15 at step 3, checkpoint saved in {saved}. Continue with"
    assert f"{said} the same command and --resume auto." in stopped.err
    assert "Traceback" not in stopped.err
    assert steps_saved(run) == [3]
    assert not (run / "model").exists()
    assert status(run, uri) == "KILLED"
    course.run(run, *tracked, "--resume", "auto")
    assert status(run, uri) == "FINISHED"
    assert weights(run) == weights(course.whole())
    assert learned(run) == learned(course.whole())


@pytest.mark.parametrize(("ranks", "batch"), [(1, 9), (1, 11), (2, 9), (2, 11)])
def test_the_last_evaluation_is_made_after_a_run_was_asked_to_stop_in_it(
    course, tmp_path, ranks, batch
):
    """Two batches, each run twice: the ninth begins the evaluation after step 6, its third.

    The eleventh begins the second pass of that evaluation.
    """
    run = tmp_path / "run"
    held_out = ("--eval-fraction", 0.3, "--set", "train.limit_eval_batches=2", "--save-every", 0)
    failpoints = [*[""] * (ranks - 1), f"evaluation.batch=term@{batch}"]
    answers = course.start(run, *held_out, ranks=ranks, failpoints=failpoints).answers()
    assert [answer.code for answer in answers] == [143] * ranks, answers
    assert steps_saved(run) == [6]
    assert not (run / "model").exists()
    course.run(run, *held_out, "--resume", "auto", ranks=ranks)
    assert weights(run) == weights(course.whole(*held_out, ranks=ranks))
    assert learned(run) == learned(course.whole(*held_out, ranks=ranks))


def test_ranks_stop_together_when_one_is_asked_to(course, tmp_path):
    run = tmp_path / "run"
    failpoints = ["", "step.started=term@3"]
    answers = course.start(run, *TWO, ranks=2, failpoints=failpoints).answers()
    assert [answer.code for answer in answers] == [143, 143], answers
    assert steps_saved(run) == [2, 3]
    course.run(run, *TWO, "--resume", "auto", ranks=2)
    assert weights(run) == weights(course.whole(*TWO, ranks=2))
    assert learned(run) == learned(course.whole(*TWO, ranks=2))


def test_a_second_signal_ends_it_at_once(course, tmp_path):
    twice = "step.started=term@3,step.before_update=term@3"
    (answer,) = course.start(tmp_path / "run", failpoints=[twice]).answers()
    assert answer.code == -signal.SIGTERM
    assert steps_saved(tmp_path / "run") == [2]


@pytest.mark.parametrize(
    ("latest", "said"),
    [
        ("step-00001200", ", checkpoint saved in {}/step-00001200"),
        ("step-00001000", ", which is not saved; the last checkpoint is {}/step-00001000"),
        ("", ", without a checkpoint"),
    ],
)
def test_an_interruption_names_its_step_and_its_checkpoint(tmp_path, latest, said):
    folder = RunFolder(tmp_path)
    folder.prepare()
    folder.latest.write_text(latest)
    assert stopped_at(folder, 1200) == f" at step 1,200{said.format(folder.checkpoints)}"


def test_a_run_keeps_others_out_of_its_folder_until_a_person_stops_it(course, tmp_path):
    training = course.start(tmp_path / "run", "--max-steps", 0, "--epochs", 1000)
    training.until("step 1:")
    for resume in ("never", "auto"):
        (other,) = course.start(tmp_path / "run", "--resume", resume).answers()
        assert other.code == 75, other
        assert f"run is in use by process {training.processes[0].pid} on" in other.err
        assert "Wait for it, or choose another --output" in other.err
    training.signal(signal.SIGINT)
    (answer,) = training.answers()
    assert answer.code == 130, answer
    assert "Interrupted by signal 2" in answer.err
    assert steps_saved(tmp_path / "run")


def test_a_launcher_that_is_asked_to_stop_leaves_a_checkpoint(course, tmp_path):
    """The ranks of torchrun and those that go on from them do not even hash words alike."""
    run, longer = tmp_path / "run", ("--max-steps", 20, "--epochs", 9, "--eval-every", 0)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    arguments = course.arguments(run, *TWO, *longer)
    process = start(*arguments, cwd=tmp_path, program=[*torchrun, "-m", "align"])
    for line in process.stderr:
        if "step 1:" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "error: Interrupted by signal 15" in err
    assert steps_saved(run)[-1] < 20
    course.run(run, *TWO, *longer, "--resume", "auto", ranks=2)
    assert weights(run) == weights(course.whole(*TWO, *longer, ranks=2))
    assert learned(run) == learned(course.whole(*TWO, *longer, ranks=2))


def test_a_run_whose_time_is_over_saves_and_says_how_to_continue(course, tmp_path):
    """No time at all: not one step is done."""
    run = tmp_path / "run"
    answer = course.run(run, "--max-time", "0s")
    assert "0 steps done\nstopped by train.max_time; the same command with --resume" in answer.out
    assert steps_saved(run) == [0]
    course.run(run, "--resume", "auto")
    assert weights(run) == weights(course.whole())
    assert learned(run) == learned(course.whole())


def test_a_run_that_learns_nothing_but_nan_has_failed(course, tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    options = ("--lr", 1e30, "--mlflow", "--set", f"tracking.uri={uri}")
    (answer,) = course.start(tmp_path / "run", *options).answers()
    assert answer.code == 6, answer
    assert "NaN or infinite, 3 times in a row" in answer.err
    assert status(tmp_path / "run", uri) == "FAILED"
    listed = (tmp_path / "run" / "nonfinite.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["row_ids"]) for line in listed] == [4, 4, 4]


def test_ranks_whose_launcher_was_killed_save_and_stop(course, tmp_path):
    """Nobody forwards a signal here: the ranks notice by themselves that they are alone."""
    run, longer = tmp_path / "run", ("--max-steps", 20, "--epochs", 9, "--eval-every", 0)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    endless = course.arguments(run, *TWO, *longer, "--max-steps", 100_000, "--epochs", 100_000)
    process = start(*endless, cwd=tmp_path, program=[*torchrun, "-m", "align"])
    for line in process.stderr:
        if "step 1:" in line:
            break
    process.kill()
    _, err = process.communicate(
        timeout=PATIENCE
    )  # its ranks hold the pipe: it is read to their end
    assert f"The launcher, process {process.pid}, has ended: this rank stops too." in err
    assert err.count("error: Interrupted by signal 15") == 2
    assert "Traceback" not in err
    saved = steps_saved(run)[-1]
    assert read_ending(RunFolder(run)).step == saved
    with owner_lock(RunFolder(run), "test"):
        pass  # nobody is at work there any more


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGUSR1, 138)], ids=["hup", "usr1"]
)
def test_other_signals_that_ask_to_stop_are_handled_too(course, tmp_path, number, code):
    run = tmp_path / "run"
    training = course.start(run, "--max-steps", 0, "--epochs", 1000)
    training.until("step 1:")
    training.signal(number)
    (answer,) = training.answers()
    assert answer.code == code, answer
    assert f"Interrupted by signal {int(number)}" in answer.err
    assert steps_saved(run)


@pytest.mark.parametrize(("stage", "ranks"), [("zero0", 1), ("zero2", 2)])
def test_a_checkpoint_is_saved_by_time_on_all_ranks_alike(course, tmp_path, stage, ranks):
    """Every moment is too late here, so one is saved before each step but the first.

    A run that resumes from such a one ends with the bits of one that was never stopped.
    """
    run, kind = tmp_path / "run", ("--deepspeed", stage, "--save-every", 0)
    often = ("--set", "train.save_minutes=0.0000001", "--keep-last", 9)
    failpoints = [*[""] * (ranks - 1), "step.before_update=kill@5"]
    answers = course.start(run, *kind, *often, ranks=ranks, failpoints=failpoints).answers()
    assert answers[-1].code == -signal.SIGKILL, answers
    assert steps_saved(run) == [0, 1, 2, 3, 4]
    course.run(run, *kind, "--resume", "auto", ranks=ranks)
    whole = course.whole("--deepspeed", stage, ranks=ranks)
    assert weights(run) == weights(whole)
    assert learned(run) == learned(whole)


def test_no_checkpoint_is_saved_by_time_where_none_is_asked_for(course, tmp_path):
    run = tmp_path / "run"
    course.run(run, "--save-every", 0, "--set", "train.save_minutes=0")
    assert steps_saved(run) == [6]
