"""What only whole processes show: signals, ranks, a terminal, what is loaded."""

import os
import re
import signal
import sys

import pytest

from support.command import align, launch, start
from support.patience import PATIENCE
from support.stage_one import contents
from support.trainings import Person, Training

SAYS_HOW_IT_WAITS = (
    *("env", "-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT"),
    "OMP_DISPLAY_ENV=VERBOSE",
)
# A command to which a signal comes as Python ends.
LATE = (
    "import atexit, os, signal, sys; from align import cli; "
    "atexit.register(os.kill, os.getpid(), signal.SIGTERM); cli.main()"
)
# A terminal that belongs to the program behind it.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def command(journey, output, *more):
    data = journey.folder / "data.parquet"
    return ["precompute-ref", data, "--output", output, "--no-mlflow", *more]


@pytest.fixture(scope="module")
def stopped(server, journey, tmp_path_factory):
    """A cache that was begun twice, and what was said as a signal of each kind came."""
    folder = tmp_path_factory.mktemp("stopped")
    person, answers = Person(server, folder, {}), {}
    for number in (signal.SIGINT, signal.SIGUSR1):
        begun = person.starts(*command(journey, folder / "cache"))
        Training((begun,)).until("reading and tokenizing")
        os.kill(begun.pid, number)
        answers[number] = begun.answer()
        assert not (folder / "cache" / "manifest.json").exists()
    return folder, answers


@pytest.fixture(scope="module")
def at_a_terminal(stopped, journey):
    """The same command once more, in a process of its own that says what it loads."""
    folder, _ = stopped
    python = (*SAYS_HOW_IT_WAITS, sys.executable, "-X", "importtime", "-m", "align")
    program = (sys.executable, "-c", TERMINAL, *python)
    return launch(*command(journey, folder / "cache"), cwd=folder, program=program)


def test_a_signal_ends_a_run_with_its_number(stopped):
    _, answers = stopped
    assert [answer.code for answer in answers.values()] == [130, 138], answers
    for number, answer in answers.items():
        assert answer.err.splitlines()[-1].startswith(f"error: Interrupted by signal {int(number)}")
        assert "Traceback" not in answer.err
        assert answer.out == ""


def test_a_signal_that_comes_as_a_command_ends_is_no_traceback():
    answer = launch("methods", program=(sys.executable, "-c", LATE))
    assert (answer.code, answer.err) == (143, ""), answer


def test_the_next_run_goes_on_to_the_same_cache_and_shows_a_bar(stopped, at_a_terminal, journey):
    assert at_a_terminal.code == 0, at_a_terminal
    assert contents(stopped[0] / "cache") == contents(journey.cache)
    assert "\x1b[" in at_a_terminal.out
    assert "scoring: 60 rows in" in at_a_terminal.out


def test_libraries_that_stage_1_has_no_use_for_are_not_loaded(at_a_terminal):
    loaded = {line.rpartition("|")[2].strip() for line in at_a_terminal.out.splitlines()}
    assert {"torch", "pyarrow.parquet", "transformers"} <= loaded
    assert not loaded & {"scipy", "pandas", "sklearn", "pyarrow.compute", "mlflow", "deepspeed"}


def test_threads_of_a_command_soon_sleep_unless_the_user_says_how_they_wait(
    at_a_terminal, monkeypatch
):
    assert "GOMP_SPINCOUNT = '1000'" in at_a_terminal.out
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert align("--help").code == 0
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    assert "OMP_WAIT_POLICY" not in os.environ


def test_two_ranks_write_what_one_process_writes(course, world, tmp_path):
    """The first shows progress, and the last to be done names the cache."""
    words = ("--model", course.model, "--output", tmp_path / "cache", "--rows-per-shard", 16)
    alone = ("--no-mlflow", "--set", "cache.reuse_known=false")
    ranks = course.server.start("precompute-ref", world.data.paired, *words, *alone, ranks=2)
    first, second = ranks.answers()
    assert (first.code, second.code) == (0, 0), (first, second)
    assert second.err == ""
    (rows,) = re.findall(r"scoring: (\d+) rows in", first.err)
    assert 0 < int(rows) < 60  # the other half is the second's
    assert [said.out.count("cache root") for said in (first, second)] in ([1, 0], [0, 1])
    assert str(tmp_path / "cache") in first.out
    assert contents(tmp_path / "cache") == contents(course.cache)


def test_a_reader_that_goes_away_is_not_an_error(journey):
    process = start("inspect", journey.cache, "--json")
    process.stdout.close()
    process.wait(PATIENCE)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
