"""A server of our own: a command that is started, waited for, and ended with all its children."""

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

PLACEHOLDER = re.compile(r"\{(\w+)\}")  # JSON in a word of the command is none
GUARD = Path(__file__).with_name("end_with_parent.py")
HOST = "127.0.0.1"
BETWEEN_LOOKS = 0.2  # seconds
LAST_LINES = 5  # of the log


def command_of(serve: str, model: str, port: int) -> list[str]:
    """The words of the command, with the model's folder and the port in place."""
    values = {"model": model, "port": str(port)}
    names = {*PLACEHOLDER.findall(serve)}
    if names != values.keys():
        said = [f"{{{name}}} is unknown" for name in sorted(names - values.keys())]
        said += [f"{{{name}}} is missing" for name in values if name not in names]
        raise UsageError(
            f"rounds.serve: {said[0]}. Write it as `vllm serve {{model}} --port {{port}}`."
        )
    try:
        words = shlex.split(serve)
    except ValueError as error:
        raise UsageError(f"rounds.serve is not a command: {error}.") from error
    if not shutil.which(words[0]):
        raise UsageError(f"rounds.serve: there is no program {words[0]!r}. Give its path.")
    return [PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]


@contextmanager
def own_server(serve: str, model: str, *, log: Path, timeout: float) -> Iterator[str]:
    """The address of a server that has the model; its output goes to the end of `log`."""
    with _held_port() as port:
        command = command_of(serve, str(Path(model).resolve()), port)
        with log.open("ab") as sink:
            begun = sink.tell()
            # The guard ends the server once this pipe is closed: here, or as this process ends.
            guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                start_new_session=True,  # or Ctrl-C would end it before its server
            )

        def require_alive(when: str) -> None:
            if guard.poll() is not None:
                raise ServerError(f"The server of rounds.serve ended {when}. {_end_of(log, begun)}")

        try:
            until = time.monotonic() + timeout
            is_ready = False
            while not is_ready:
                time.sleep(BETWEEN_LOOKS)
                is_ready = _is_ready(port)
                require_alive("before it was ready")  # also if another process answers at its port
                if not is_ready and time.monotonic() > until:
                    raise ServerError(
                        f"The server of rounds.serve does not answer at port {port} after "
                        f"{timeout:g} s (rounds.serve_timeout). {_end_of(log, begun)}"
                    )
            while_sampling = "while it sampled; the same command resumes"
            try:
                yield f"http://{HOST}:{port}/v1"
            except ServerError:
                with suppress(subprocess.TimeoutExpired):  # it may be about to end
                    guard.wait(1)
                require_alive(while_sampling)
                raise
            require_alive(while_sampling)
        finally:
            assert guard.stdin, "it is a pipe"
            guard.stdin.close()
            guard.wait()


@contextmanager
def _held_port() -> Iterator[int]:
    """A free port that the system gives to no other program during the block.

    It is bound here and nobody listens, which a server may that asks to reuse addresses: they do.
    """
    with socket.socket() as held:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]


def _is_ready(port: int) -> bool:
    """Whether the server is in good health; one without such a page lists its models."""
    for path in ("/health", "/v1/models"):
        with closing(HTTPConnection(HOST, port, timeout=5)) as connection:  # past any proxy
            try:
                connection.request("GET", path)
                status = connection.getresponse().status
            except (OSError, HTTPException):
                return False
        if not 400 <= status < 500:
            return status == 200
    return False


def _end_of(log: Path, begun: int) -> str:
    """The last lines that the server has written."""
    lines = log.read_bytes()[begun:].decode(errors="replace").splitlines()[-LAST_LINES:]
    return f"The end of {log}:\n  " + "\n  ".join(line[:300] for line in lines)
