"""A process that keeps what it samples is killed on its way, and started again."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import support
from support.asking import echo, options_of
from support.chat_server import chat_server
from support.keep_samples import kept_in
from support.patience import PATIENCE

IN_FLIGHT, KILLS, PROMPTS, N = 4, 3, 10, 12
TESTS = Path(support.__file__).parents[1]


def started(stub, folder):
    options = json.dumps(asdict(options_of(stub, concurrency=IN_FLIGHT)))
    command = [sys.executable, "-m", "support.keep_samples", str(folder), str(PROMPTS), str(N)]
    return subprocess.Popen([*command, options], env=os.environ | {"PYTHONPATH": str(TESTS)})


@pytest.mark.parametrize("faults", [{}, {500: 0.1, "cut": 0.1, "half": 0.1}], ids=["none", "30 %"])
def test_what_is_asked_twice_after_a_kill_was_in_flight(faults, tmp_path):
    reached = []

    def answer(asked):
        """Ends the process after every 25 answers, in the middle of its work."""
        if running and stub.answered.total() >= 25 * (len(reached) + 1) and len(reached) < KILLS:
            reached.append(stub.answered.total())
            running[-1].kill()
        return echo(asked)

    running = []
    with chat_server(answer, faults=faults, delay=0.002) as stub:
        while not running or running[-1].wait(PATIENCE):
            assert len(running) <= KILLS
            running.append(started(stub, tmp_path))
    kept = kept_in(tmp_path)
    assert len(reached) == KILLS == len(running) - 1
    assert len(kept) == PROMPTS * N
    assert len(stub.asked) == PROMPTS * N
    again = stub.answered.total() - PROMPTS * N
    assert again <= KILLS * IN_FLIGHT
    assert stub.asked.total() <= PROMPTS * N + stub.injected.total() + KILLS * IN_FLIGHT
    assert set(kept.values()) == {echo(asked).text for asked in stub.requests}
