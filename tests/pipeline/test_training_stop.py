"""Asked to stop, training saves first; the next run resumes to the same bits."""

import json
import os
import signal

from align.pipeline.signals import STOPS, asked_to_stop, stop_signals
from align.stages.storage.locks import owner_lock
from align.stages.storage.run_folder import RunFolder, read_ending
from support.tracked_training import run_of
from support.trainings import KILLED, require_same

RESUME = ("--resume", "auto")
TWO = ("--deepspeed", "zero2")
SOME = (*TWO, "--eval-fraction", 0.3, "--set", "train.limit_eval_batches=2")
ENDLESS = ("--max-steps", 0, "--epochs", 100_000, "--eval-every", 0)


def steps_saved(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def status(run, uri):
    """How MLflow says that a run ended."""
    record = json.loads((run / "_align" / "mlflow.json").read_text())
    return run_of(uri, record["run_id"]).info.status


def test_a_run_that_is_stopped_in_any_way_saves_and_resumes_to_the_same_bits(course, tmp_path):
    """By its time, by a signal in the middle of a step, and by a kill; each is written down."""
    run, uri = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    words = ("--mlflow", "--set", f"tracking.uri={uri}", "--save-every", 0, *RESUME)

    def ended():
        ending = read_ending(RunFolder(run))
        return (ending.ending, ending.step, ending.total_steps)

    out_of_time = course.run(run, *words, "--max-time", "0s")
    assert "stopped by train.max_time; the same command with --resume" in out_of_time.out
    assert ended() == ("time", 0, 6)
    assert steps_saved(run) == [0]

    (asked,) = course.start(run, *words, failpoints=["step.before_update=term@3"]).answers()
    assert asked.code == 143, asked
    place = run / "checkpoints" / "step-00000003"  # the step is finished first
    assert f"Interrupted by signal 15 at step 3, checkpoint saved in {place}." in asked.err
    assert "Traceback" not in asked.err
    assert ended() == ("signal", 3, 6)
    assert steps_saved(run) == [0, 3]
    assert status(run, uri) == "KILLED"
    assert not (run / "model").exists()

    (killed,) = course.start(run, *words, failpoints=["step.started=kill@1"]).answers()
    assert killed.code == KILLED, killed
    assert read_ending(RunFolder(run)) is None

    course.run(run, *words)
    assert ended() == ("finished", 6, 6)
    assert status(run, uri) == "FINISHED"
    require_same(run, course.whole())


def test_ranks_stop_together_when_one_is_asked_to(course, tmp_path):
    """In step 3, and in the second batch of the last evaluation, which is made when it goes on."""
    run = tmp_path / "run"
    # Each evaluation runs its batches twice; that of step 3 is made after the first stop.
    for failpoint, steps in (("step.started=term@3", [2, 3]), ("evaluation.batch=term@6", [4, 6])):
        ranks = course.start(run, *SOME, *RESUME, ranks=2, failpoints=["", failpoint])
        answers = ranks.answers()
        assert [answer.code for answer in answers] == [143, 143], answers
        assert steps_saved(run) == steps
        assert not (run / "model").exists()
    course.run(run, *SOME, *RESUME, ranks=2)
    require_same(run, course.whole(*SOME, ranks=2))


def test_a_second_signal_ends_it_at_once(course, tmp_path):
    twice = "step.started=term@3,step.before_update=term@3"
    (answer,) = course.start(tmp_path / "run", failpoints=[twice]).answers()
    assert answer.code == -signal.SIGTERM
    assert steps_saved(tmp_path / "run") == [2]


def test_every_signal_that_asks_to_stop_is_heard_once(monkeypatch):
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        with asked_to_stop() as asked:
            assert not asked()
            signal.raise_signal(number)
            assert asked()
            assert asked.signal_number == number
            assert signal.getsignal(number) is signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in STOPS} == before
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # as under nohup
    assert set(STOPS) - set(stop_signals()) == {signal.SIGHUP}


def test_a_run_keeps_others_out_of_its_folder_until_a_person_stops_it(course, tmp_path):
    training = course.start(tmp_path / "run", *ENDLESS)
    training.until("step 1:")
    (other,) = course.start(tmp_path / "run", *RESUME).answers()
    assert other.code == 75, other
    assert f"run is in use by process {training.processes[0].pid} on" in other.err
    training.signal(signal.SIGINT)
    (answer,) = training.answers()
    assert answer.code == 130, answer
    assert steps_saved(tmp_path / "run")


def test_ranks_whose_launcher_was_killed_save_and_stop(course, tmp_path):
    """Nobody forwards a signal here: the ranks notice by themselves that they are alone."""

    def torchrun(rank, port):
        ranks = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return ranks | meeting | {"TORCHELASTIC_RUN_ID": "none"}

    run = tmp_path / "run"
    training = course.start(run, *TWO, *ENDLESS, ranks=2, launcher=torchrun, has_launcher=True)
    training.until("step 1:")
    launchers = [process.launcher for process in training.processes]
    for launcher in launchers:
        os.kill(launcher, signal.SIGKILL)
    answers = training.answers()
    assert [answer.code for answer in answers] == [143, 143], answers
    said = [f"The launcher, process {one}, has ended: this rank stops too." for one in launchers]
    # Who notices first stops the other.
    assert any(one in answer.err for one, answer in zip(said, answers, strict=True)), answers
    assert "Traceback" not in answers[0].err + answers[1].err
    assert read_ending(RunFolder(run)).step == steps_saved(run)[-1]
    with owner_lock(RunFolder(run), "test"):
        pass  # nobody is at work there any more


def test_a_run_that_learns_nothing_but_nan_has_failed(course, tmp_path):
    run, uri = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    options = ("--lr", 1e30, "--mlflow", "--set", f"tracking.uri={uri}")
    (answer,) = course.start(run, *options).answers()
    assert answer.code == 6, answer
    assert "NaN or infinite, 3 times in a row" in answer.err
    assert status(run, uri) == "FAILED"
    listed = [json.loads(line) for line in (run / "nonfinite.jsonl").read_text().splitlines()]
    assert [line["step"] for line in listed] == [2, 3, 4]
    assert len({row for line in listed for row in line["row_ids"]}) == 12
    told = (run / "metrics.jsonl").read_text()
    assert "NaN" not in told
    assert "Infinity" not in told
    assert not (run / "model").exists()


def test_a_checkpoint_is_saved_by_time_on_all_ranks_alike(course, tmp_path):
    """Every moment is too late here, so one is saved before each step but the first.

    A run that resumes from such a one ends with the bits of one that was never stopped.
    """
    run, kind = tmp_path / "run", (*SOME, "--save-every", 0)
    often = ("--set", "train.save_minutes=0.0000001", "--keep-last", 9)
    failpoints = ["", "step.before_update=kill@5"]
    answers = course.start(run, *kind, *often, ranks=2, failpoints=failpoints).answers()
    assert answers[-1].code == KILLED, answers
    assert steps_saved(run) == [0, 1, 2, 3, 4]
    course.run(run, *kind, *RESUME, ranks=2)
    require_same(run, course.whole(*SOME, ranks=2))
