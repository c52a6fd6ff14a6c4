"""What only a whole process shows: signals, a terminal, a closed pipe, the host's settings."""

import os
import signal
import sys

import pytest

from support.command import launch, said_by, start
from support.patience import PATIENCE
from support.stage_one import contents
from support.trainings import Person, Training

# A command that gets a signal while Python exits.
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
    """A cache that two signals interrupted, and the answers of both commands."""
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
    """The same command once more, in a process of its own."""
    folder, _ = stopped
    program = (sys.executable, "-c", TERMINAL, sys.executable, "-m", "align")
    return launch(*command(journey, folder / "cache"), cwd=folder, program=program)


def test_a_signal_ends_a_run_with_its_number(stopped):
    _, answers = stopped
    assert [answer.code for answer in answers.values()] == [130, 138], answers
    for number, answer in answers.items():
        assert f"signal {int(number)}" in answer.err.splitlines()[-1]
        assert "Traceback" not in answer.err
        assert answer.out == ""


def test_a_signal_that_comes_as_a_command_ends_is_no_traceback():
    answer = launch("methods", program=(sys.executable, "-c", LATE))
    assert (answer.code, answer.err) == (143, ""), answer


def test_the_next_run_goes_on_to_the_same_cache_and_shows_a_bar(stopped, at_a_terminal, journey):
    assert at_a_terminal.code == 0, at_a_terminal
    assert contents(stopped[0] / "cache") == contents(journey.cache)
    assert "\x1b[" in at_a_terminal.out
    assert "scoring: 60 rows" in at_a_terminal.out


def test_a_reader_that_goes_away_is_not_an_error(journey):
    process = start("inspect", journey.cache, "--json")
    process.stdout.close()
    process.wait(PATIENCE)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


SCRIPT = """
import csv, gc, io, json, logging, os, signal, sys, warnings
warnings.simplefilter("ignore")
import deepspeed, mlflow, pyarrow, torch, transformers  # what they set is theirs
import peft, sympy.utilities.exceptions, torch._dynamo, torch.optim.lr_scheduler
import mlflow.store.tracking.sqlalchemy_store, mlflow.tracking.context.registry
transformers.utils.logging.get_verbosity()
warnings.resetwarnings()
warnings.simplefilter("ignore")
logging.getLogger("mlflow").setLevel(logging.NOTSET)

def state():
    names = [None, "align", "mlflow", "alembic", "urllib3", "transformers", "torch", "DeepSpeed"]
    loggers = [logging.getLogger(name) for name in names]
    return {
        "filters": [str(one) for one in warnings.filters],
        "csv": csv.field_size_limit(),
        "logging": [(one.name, one.level, one.propagate, len(one.handlers)) for one in loggers],
        "last resort": str(logging.lastResort.formatter),
        "signals": {str(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "linear": torch.nn.functional.linear.__module__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().sum().item(),
        "hooks": [str(sys.excepthook), str(sys.stdout), str(sys.stderr)],
        "collector": (gc.isenabled(), gc.get_threshold()),
        "umask": os.umask(0o022),
    }

os.umask(0o022)
before = state()
data, model, home = sys.argv[1:]

def compare(after_what):
    now = state()
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed, (after_what, changed)

import align, align.cli, align.stages.engine.distributed, align.stages.engine.deepspeed_state
import align.pipeline.train.train, align.pipeline.train.sweep, align.pipeline.precompute.verify
compare("import")

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from pathlib import Path

store = {"tracking.uri": f"sqlite:///{home}/mlflow.db"}
align.precompute(data, model=model, output=f"{home}/cache", settings=store)
compare("stage 1")
few = {"train.max_steps": 1, "train.eval_fraction": 0.2, "train.lr": 0.001}
few["train.deepspeed"] = "zero3"
align.train("dpo", cache=f"{home}/cache", output=f"{home}/run", settings=store | few)
compare("stage 2")
align.load_cache(f"{home}/cache", text=True).collect()
compare("load_cache")
sync_runs(Path(home) / "run", TrackingOptions(uri=store["tracking.uri"]))
compare("mlflow-sync")
"""


def test_the_library_leaves_its_host_as_it_was(world, tmp_path):
    said_by(
        *(sys.executable, "-c", SCRIPT, world.data.paired_csv, world.model, tmp_path), cwd=tmp_path
    )
