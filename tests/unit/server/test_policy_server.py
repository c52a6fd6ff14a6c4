"""A server that align starts: waited for, and ended with its children however align ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from align.schemas.errors import ServerError, UsageError
from align.stages.server import policy_server as policy_server_module
from align.stages.server.policy_server import GUARD, policy_server, server_command
from support.patience import PATIENCE
from support.refusals import refuses
from support.stub_policy import pids_in, require_ended, runs, serve_by


@pytest.fixture
def serving(tokenizer_folder, tmp_path):
    """Starts a stub in a way of its own."""

    def begin(*words, timeout=PATIENCE):
        serve = serve_by(tmp_path / "events", *words)
        return policy_server(serve, tokenizer_folder, log=tmp_path / "server.log", timeout=timeout)

    return begin


def test_a_command_has_the_model_and_the_port_and_keeps_its_other_braces():
    serve = f"{sys.executable} -m some {{model}} --port={{port}} --more '{{\"a b\": 1}}'"
    words = server_command(serve, "/a model", 81)
    assert words == [sys.executable, "-m", "some", "/a model", "--port=81", "--more", '{"a b": 1}']


@pytest.mark.parametrize(
    ("serve", "named"),
    [
        ("sh {model} {port} {url}", "{url}"),
        ("sh {model}", "{port}"),
        ("sh --port {port}", "{model}"),
        ("sh '{model} {port}", "rounds.serve"),
        ("no-such-program {model} {port}", "no-such-program"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_by_name(serve, named):
    with refuses(UsageError, "rounds.serve", named):
        server_command(serve, "model", 80)


@pytest.mark.parametrize("says", ["ready", "stubborn"])
def test_a_server_ends_with_its_children_also_if_it_ignores_sigterm(
    serving, tmp_path, monkeypatch, says
):
    guard = tmp_path / "guard.py"
    guard.write_text(re.sub("^GRACE = 10", "GRACE = 0.5", GUARD.read_text(), flags=re.MULTILINE))
    assert guard.read_text() != GUARD.read_text()
    monkeypatch.setattr(policy_server_module, "GUARD", guard)
    with serving("--says", says) as url:
        assert url.endswith("/v1")
        assert len(pids_in(tmp_path / "events")) == 2
        assert all(map(runs, pids_in(tmp_path / "events")))
    require_ended(pids_in(tmp_path / "events"))


@pytest.mark.parametrize(
    ("words", "timeout", "named"),
    [
        (("--says", "error"), PATIENCE, ("CUDA out of memory",)),
        (("--says", "taken"), PATIENCE, ("Address already in use",)),
        (("--says", "nothing"), 0.5, ("rounds.serve_timeout", "0.5")),
    ],
)
def test_a_server_that_is_never_ready_is_one_message_with_the_end_of_its_log(
    serving, tmp_path, words, timeout, named
):
    with refuses(ServerError, tmp_path / "server.log", *named), serving(*words, timeout=timeout):
        pass
    if pids := pids_in(tmp_path / "events"):
        require_ended(pids)


@pytest.mark.parametrize("has_asked", [False, True])
def test_a_dead_server_is_the_error_and_nobody_else_gets_its_port(serving, tmp_path, has_asked):
    with refuses(ServerError, "rounds.serve", tmp_path / "server.log"), serving() as url:
        server, child = pids_in(tmp_path / "events")
        guard = parent_of(server)
        os.kill(server, signal.SIGKILL)
        require_ended([server, child, guard])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", urlsplit(url).port))
        if has_asked:
            raise ServerError("no answer")


def test_an_error_of_a_server_that_lives_stays(serving):
    with pytest.raises(ServerError, match="no answer"), serving():
        raise ServerError("no answer")


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_server_ends_with_its_guard(serving, tmp_path, how):
    with refuses(ServerError, "rounds.serve"), serving():
        pids = pids_in(tmp_path / "events")
        os.kill(parent_of(pids[0]), getattr(signal, how))
        require_ended(pids)
        raise ServerError("no answer")


KILLED = """
import os, signal, sys
from pathlib import Path
from align.stages.server.policy_server import policy_server
serve, model, log = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
with policy_server(serve, model, log=Path(log), timeout=60):
    os.kill(os.getpid(), signal.{how})
    signal.pause()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_server_ends_with_an_align_that_is_killed(tokenizer_folder, tmp_path, how):
    words = [serve_by(tmp_path / "events"), tokenizer_folder, tmp_path / "server.log"]
    script = KILLED.format(how=how)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0
    if how != "SIGINT":  # which Python tells
        assert done.returncode == -getattr(signal, how)
    require_ended(pids_in(tmp_path / "events"))
