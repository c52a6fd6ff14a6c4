"""A server of a policy that loads nothing, as a program: `rounds.serve` starts it.

It counts the tokens of a prompt as the model's tokenizer does, answers by the seed, and writes a
line for each thing that happens to LOG: `model PATH`, `pid N`, `asked KEY`, `answered KEY`.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from support.chat_server import ChatServer  # noqa: E402 - it is found only now

LIFE = 300  # seconds, if nobody ends it
JUDGES_KEY = "of-the-judge"  # which a policy is never given
SOON = 60  # seconds until what was ended has to be gone


class StubPolicy(ChatServer):
    """Tells what happens to a file, so that several processes count together."""

    def __init__(self, model, log, dies_after):
        super().__init__(answer, model=model)
        # Where there is no server to start, the library is not needed.
        from tokenizers import Tokenizer  # noqa: PLC0415

        self.tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        self.log, self.dies_after = log, dies_after

    def begin(self, asked):
        write(self.log, "asked", key_of(asked))
        if JUDGES_KEY in asked.headers.get("authorization", ""):
            write(self.log, "key", key_of(asked))
        return super().begin(asked)

    def reply(self, asked, fault):
        found = super().reply(asked, fault)
        found["usage"]["prompt_tokens"] = len(self.tokenizer.encode(asked.last).ids)
        return found

    def note(self, asked, reply, fault):
        super().note(asked, reply, fault)
        if self.dies_after is not None and self.answered.total() > self.dies_after:
            print("the stub dies in the middle", flush=True)
            os._exit(3)
        write(self.log, "answered", key_of(asked))


def answer(asked):
    """Some letters, which follow from the seed of the request alone."""
    drawn = random.Random(asked.seed)
    return " ".join("".join(drawn.choices("abcdefgh", k=4)) for _ in range(4))


def key_of(asked):
    return sha256(asked.content.encode()).hexdigest()[:16]


def write(log, *words):
    """One line at once, from whichever process or thread."""
    with Path(log).open("ab", buffering=0) as sink:
        sink.write(f"{' '.join(map(str, words))}\n".encode())


def events(log):
    """What happened so far: (what, of what)."""
    lines = log.read_text().splitlines() if log.exists() else ()
    return [tuple(line.split(" ", 1)) for line in lines]


def pids_in(log):
    """The server and its child."""
    return [int(of) for what, of in events(log) if what == "pid"]


def require_ended(pids):
    """Waits until none of these processes runs."""
    assert pids
    until = time.monotonic() + SOON
    while any(map(runs, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.05)


def runs(pid):
    """Whether there is such a process that has not ended: one that nobody waits for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def serve_by(log, *words):
    """The value of rounds.serve."""
    return " ".join([sys.executable, __file__, "{model} --port {port} --log", str(log), *words])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--dies-after", type=int)  # so many answers
    parser.add_argument("--says", default="ready")  # what it does instead of serving
    options = parser.parse_args()
    if options.says == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its child then does
    write(options.log, "model", options.model)
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LIFE})"])
    write(options.log, "pid", os.getpid())
    write(options.log, "pid", child.pid)
    if options.says == "nothing":
        time.sleep(LIFE)
    if options.says == "taken":
        taken = socket.create_server(("127.0.0.1", options.port))
        print(f"port taken: {taken.getsockname()}", flush=True)
    if options.says == "error":
        sys.exit("CUDA out of memory, says the stub")
    stub = StubPolicy(options.model, options.log, options.dies_after)
    stub.port = options.port
    stub.start()
    threading.Event().wait(LIFE)


if __name__ == "__main__":
    main()
