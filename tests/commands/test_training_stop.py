"""Asked to stop, training saves first; the next run resumes to the same bits."""

import json
import os
import signal

from align.pipeline.jobs.signals import STOPS, asked_to_stop, stop_signals
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.run.checkpoints import read_checkpoint
from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.refusals import require_names
from support.trainings import KILLED, require_same

RESUME = ("--resume", "auto")
TWO = ("--deepspeed", "zero2")
SOME = (*TWO, "--eval-fraction", 0.3, "--set", "train.limit_eval_batches=2")
ENDLESS = ("--max-steps", 0, "--epochs", 100_000, "--eval-every", 0)


def steps_saved(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def test_a_stopped_run_resumes_to_the_same_bits(course, tmp_path):
    """By its time, by a signal in the middle of a step, and by a kill; each is written down."""
    run, words = tmp_path / "run", ("--save-every", 0, *RESUME)

    def ended():
        ending = read_ending(RunFolder(run))
        return (ending.ending, ending.step, ending.total_steps)

    out_of_time = course.run(run, *words, "--max-time", "0s")
    require_names(out_of_time.out, "train.max_time", "--resume")
    assert ended() == ("time", 0, 6)
    assert steps_saved(run) == [0]

    asked = course.ends(143, run, *words, fault="before:update=term@3")
    place = run / "checkpoints" / "step-00000003"  # the step is finished first
    require_names(asked.err, "signal 15", "step 3", place)
    assert "Traceback" not in asked.err
    assert ended() == ("signal", 3, 6)
    assert "3 of 6" in (run / "report.html").read_text()
    assert steps_saved(run) == [0, 3]
    assert not (run / "model").exists()

    course.ends(KILLED, run, *words, fault="before:update=kill@1")
    assert read_ending(RunFolder(run)) is None

    course.run(run, *words)
    assert ended() == ("finished", 6, 6)
    require_same(run, course.whole())


def test_a_stopped_evaluation_is_made_on_resume(course, tmp_path):
    """In the middle evaluation, and then in the last one, which are after steps 3 and 6."""
    run, words = tmp_path / "run", ("--save-every", 0, *RESUME)
    for step in (3, 6):
        # The fifth batch: the evaluation before it, which is made anew or at the start, has four.
        course.ends(143, run, *words, fault="before:held_out=term@5")
        state = read_checkpoint(run / "checkpoints" / f"step-{step:08d}").state
        assert (state.step, state.evaluated, state.best) == (step, False, None)
        assert not any(name.startswith("eval/") for name in state.metrics)
        assert not (run / "model").exists()
    course.run(run, *words)
    assert read_checkpoint(run / "checkpoints" / "step-00000006").state.evaluated
    require_same(run, course.whole())


def test_ranks_save_and_stop_together(course, tmp_path):
    """Every moment is too late here, so a checkpoint is saved before each step but the first.

    The signal comes in the second batch of the last evaluation, which is made when it goes on.
    """
    run, often = tmp_path / "run", ("--set", "train.save_minutes=0.0000001", "--keep-last", 9)
    faults = ["", "before:update=kill@5"]
    answers = course.start(run, *SOME, *often, ranks=2, faults=faults).answers()
    assert answers[-1].code == KILLED, answers
    assert steps_saved(run) == [0, 1, 2, 3, 4]
    assert "Rank 0" in (run / "report.html").read_text()
    # Each evaluation runs its batches twice.
    how = {"ranks": 2, "faults": ["", "before:held_out=term@2"]}
    answers = course.start(run, *SOME, *RESUME, **how).answers()
    assert [answer.code for answer in answers] == [143, 143], answers
    assert steps_saved(run)[-1] == 6
    assert not (run / "model").exists()
    course.run(run, *SOME, *RESUME, ranks=2, launcher=srun)
    require_same(run, course.whole(*SOME, ranks=2))


def srun(rank, port):
    """The environment that it gives two tasks on two machines."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    nodes = {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "MASTER_PORT": port}
    return {**step, **nodes, "SLURM_PROCID": rank, "SLURM_LOCALID": 0}


def test_a_second_signal_ends_it_at_once(course, tmp_path):
    twice = "before:backward=term@3,before:update=term@3"
    ended = course.ends(-signal.SIGTERM, tmp_path / "run", fault=twice)
    require_names(ended.err, "signal 15")  # the first one is answered before the step's end
    assert steps_saved(tmp_path / "run") == [2]


def test_every_signal_that_asks_to_stop_is_heard_once(monkeypatch):
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        said = []
        with asked_to_stop(said.append) as asked:
            assert not asked()
            signal.raise_signal(number)
            assert [f"signal {number:d}" in line for line in said] == [True]
            assert asked()
            assert asked.signal_number == number
            assert signal.getsignal(number) is signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in STOPS} == before
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # as under nohup
    assert set(STOPS) - set(stop_signals()) == {signal.SIGHUP}


def test_a_run_keeps_others_out_of_its_folder_until_a_person_stops_it(course, tmp_path):
    training = course.start(tmp_path / "run", *ENDLESS)
    training.until("step 1:")
    other = course.ends(75, tmp_path / "run", *RESUME)
    require_names(other.err, tmp_path / "run", training.processes[0].pid)
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
    said = [f"process {one}" for one in launchers]
    # Who notices first stops the other.
    assert any(one in answer.err for one, answer in zip(said, answers, strict=True)), answers
    assert "Traceback" not in answers[0].err + answers[1].err
    assert read_ending(RunFolder(run)).step == steps_saved(run)[-1]
    with owner_lock(run, "test"):
        pass  # nobody is at work there any more


def test_a_run_that_learns_nothing_but_nan_has_failed(course, tmp_path):
    run = tmp_path / "run"
    course.ends(6, run, "--lr", 1e30)
    listed = [json.loads(line) for line in (run / "nonfinite.jsonl").read_text().splitlines()]
    assert [line["step"] for line in listed] == [2, 3, 4]
    assert len({row for line in listed for row in line["row_ids"]}) == 12
    told = (run / "metrics.jsonl").read_text()
    assert "NaN" not in told
    assert "Infinity" not in told
    assert not (run / "model").exists()


def test_weights_that_a_last_step_has_made_infinite_are_no_model(course, tmp_path):
    run = tmp_path / "run"
    extreme = ("--lr", 1e30, "--set", "train.weight_decay=1e10", "--warmup", 0, "--max-steps", 1)
    course.ends(6, run, *extreme, "--eval-fraction", 0)
    assert not (run / "model").exists()
