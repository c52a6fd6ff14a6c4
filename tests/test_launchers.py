"""What only whole processes show: signals, ranks, a second run at the same moment."""

import hashlib
import shutil
import signal
import sys
from pathlib import Path

import pytest

from support.command import launch, start
from support.patience import PATIENCE
from support.stage_one import contents

NOTHING_SAID = ("-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT")
SAYS_HOW_IT_WAITS = ("env", *NOTHING_SAID, "OMP_DISPLAY_ENV=VERBOSE")


def command(journey, output, *more):
    data = journey.folder / "data.parquet"
    return ["precompute-ref", data, "--output", output, "--no-mlflow", *more]


def shards(cache):
    parts = (cache / "data").iterdir()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in parts}


def until_it_scores(process):
    """Reads on until the run says that it scores; the weights are not loaded by then."""
    for line in process.stderr:
        if line.startswith("scoring"):
            return
    raise AssertionError("it never began to score")


def test_signals_end_a_run_with_their_number_and_the_next_run_goes_on(journey, tmp_path):
    for number, code in (
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
    ):
        process = start(*command(journey, tmp_path / "cache"), cwd=tmp_path)
        until_it_scores(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, err
        last = err.splitlines()[-1]
        assert last.startswith(f"error: Interrupted by signal {int(number)}")
        assert "Traceback" not in err
        assert out == ""
        assert not (tmp_path / "cache" / "manifest.json").exists()
    done = launch(*command(journey, tmp_path / "cache"), cwd=tmp_path)
    assert done.code == 0, done
    assert contents(tmp_path / "cache") == contents(journey.cache)


def test_two_ranks_of_torchrun_write_what_one_process_writes(journey, tmp_path):
    # The one process was told to use one thread, which decides the last bits of a sum.
    torchrun = [*SAYS_HOW_IT_WAITS, "OMP_NUM_THREADS=2", Path(sys.executable).with_name("torchrun")]
    torchrun += ["--nproc-per-node", "2"]
    module = [*torchrun, "--master-port", "0", "-m", "align"]
    done = launch(*command(journey, tmp_path / "cache"), cwd=tmp_path, program=module)
    assert done.code == 0, done
    assert done.err.count("GOMP_SPINCOUNT = '1000'") == 2  # the launcher itself spins
    assert contents(tmp_path / "cache") == contents(journey.cache)
    assert shards(tmp_path / "cache") == shards(journey.cache)
    assert done.out.count("cache root") == 1  # of two ranks the first alone is heard


def test_how_threads_wait_is_for_the_user_to_say(tmp_path):
    torch_of_a_command = "from align.cli import own_process; own_process([]); import torch"
    program = (*SAYS_HOW_IT_WAITS, "GOMP_SPINCOUNT=77", sys.executable, "-c", torch_of_a_command)
    done = launch(cwd=tmp_path, program=program)
    assert done.code == 0, done
    assert "GOMP_SPINCOUNT = '77'" in done.err


def test_a_reader_that_goes_away_is_not_an_error(journey):
    process = start("inspect", journey.cache, "--json")
    process.stdout.close()
    process.wait(PATIENCE)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.skipif(not shutil.which("script"), reason="needs script(1) for a terminal")
def test_a_terminal_gets_a_bar_that_is_taken_away(journey, tmp_path):
    words = " ".join(map(str, command(journey, tmp_path / "cache")))
    terminal = ["script", "-qec", f"{sys.executable} -m align {words}", "/dev/null"]
    done = launch(program=terminal, cwd=tmp_path)
    assert done.code == 0, done
    assert "\x1b[" in done.out
    assert "scoring: 60 rows in" in done.out


def test_of_the_ranks_of_stage_1_the_first_shows_progress_and_the_last_names_the_cache(
    course, world, tmp_path
):
    words = ("--model", course.model, "--output", tmp_path / "cache", "--rows-per-shard", 4)
    start = course.server.start
    first, second = start("precompute-ref", world.data.paired, *words, ranks=2).answers()
    assert (first.code, second.code) == (0, 0), (first, second)
    assert second.err == ""
    assert "scoring: 32 rows in" in first.err, first  # 8 of 15 units
    assert [said.out.count("cache root") for said in (first, second)] in ([1, 0], [0, 1])
    assert str(tmp_path / "cache") in first.out
