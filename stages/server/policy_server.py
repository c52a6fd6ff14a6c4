"""Starts the command of rounds.serve, waits for its server, and ends it with all its children."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from ...schemas.errors import ServerError, UsageError

PLACEHOLDER = re.compile(r"\{(\w+)\}")  # does not match JSON in a word of the command
GUARD = Path(__file__).with_name("end_with_parent.py")
HOST = "127.0.0.1"
POLL_SECONDS = 0.05
LAST_LINES = 5  # of the log, shown in errors


def server_command(serve: str, model: str, port: int) -> list[str]:
    """The words of the command, with the model's folder and the port filled in."""
    values = {"model": model, "port": str(port)}
    names = {*PLACEHOLDER.findall(serve)}
    if names != values.keys():
        faults = [f"{{{name}}} is unknown" for name in sorted(names - values.keys())]
        faults += [f"{{{name}}} is missing" for name in values if name not in names]
        raise UsageError(
            f"rounds.serve: {faults[0]}. Write it as `vllm serve {{model}} --port {{port}}`."
        )
    try:
        words = shlex.split(serve)
    except ValueError as error:
        raise UsageError(f"rounds.serve is not a command: {error}. Correct it.") from error
    if not shutil.which(words[0]):
        raise UsageError(f"rounds.serve: the program {words[0]!r} is not found. Give its path.")
    return [PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]


@contextmanager
def policy_server(serve: str, model: str, *, log: Path, timeout: float) -> Iterator[str]:
    """Runs a server of the model during the block; yields its address, appends output to `log`."""
    with _reserved_port() as port:
        command = server_command(serve, str(Path(model).resolve()), port)
        with log.open("ab") as sink:
            log_start = sink.tell()
            # The guard ends the server once this pipe closes: below, or when this process ends.
            guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                start_new_session=True,  # otherwise Ctrl-C ends the guard before its server
            )

        def require_alive(when: str) -> None:
            if guard.poll() is not None:
                last_lines = _last_lines(log, log_start)
                raise ServerError(f"The server of rounds.serve ended {when}. {last_lines}")

        try:
            until = time.monotonic() + timeout
            is_ready = False
            while not is_ready:
                time.sleep(POLL_SECONDS)
                is_ready = _is_ready(port)
                # Checked even if it is ready, because another process may answer at its port.
                require_alive("before it was ready; correct the command")
                if not is_ready and time.monotonic() > until:
                    raise ServerError(
                        f"The server of rounds.serve does not answer at port {port} after "
                        f"{timeout:g} s. Raise rounds.serve_timeout, or correct rounds.serve. "
                        f"{_last_lines(log, log_start)}"
                    )
            while_sampling = "while it sampled; the same command resumes"
            try:
                yield f"http://{HOST}:{port}/v1"
            except ServerError:
                with suppress(subprocess.TimeoutExpired):  # the server may be about to end
                    guard.wait(1)
                require_alive(while_sampling)
                raise
            require_alive(while_sampling)
        finally:
            assert guard.stdin, "a pipe"
            guard.stdin.close()
            guard.wait()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port that the system gives to no other program during the block.

    The port is bound here without a listener. The server can still bind it, because common servers
    set the options for reuse too.
    """
    with socket.socket() as reserved:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            reserved.setsockopt(socket.SOL_SOCKET, option, 1)
        reserved.bind((HOST, 0))
        yield reserved.getsockname()[1]


def _is_ready(port: int) -> bool:
    """Whether the server reports its health, or lists its models if it has no health page."""
    for path in ("/health", "/v1/models"):
        # HTTPConnection ignores the proxies of the environment.
        with closing(HTTPConnection(HOST, port, timeout=5)) as connection:
            try:
                connection.request("GET", path)
                status = connection.getresponse().status
            except (OSError, HTTPException):
                return False
        if not 400 <= status < 500:
            return status == 200
    return False


def _last_lines(log: Path, start: int) -> str:
    """The last lines that the server has written to the log."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()[-LAST_LINES:]
    return f"The last lines of {log}:\n  " + "\n  ".join(line[:300] for line in lines)
