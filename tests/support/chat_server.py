"""A server with OpenAI's interface on loopback, that answers by a function and misbehaves at rates.

    with chat_server(lambda asked: f"{asked.last} {asked.seed}", faults={500: 0.1}) as stub:
        ...  # stub.url is the address; stub.asked, stub.answered and stub.tokens say what happened

What happens to a request follows from the seed, what it asks and how often that was asked before:
in whatever order requests come, each meets the same faults.
"""

import json
import random
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Beside any HTTP status, each of which is a fault too.
FAULTS = frozenset(
    (
        "hang",  # no answer for `late` seconds, then none at all
        "drop",  # the connection is closed
        "cut",  # and in the middle of the answer
        "half",  # the first half of the JSON, as if it were all
        *("slow head", "slow body", "slow welcome"),  # a byte now and then for `late` seconds
        "garbage",  # no JSON
        "no usage",
        "no choices",
        "two choices",
        "no finish",
        "other model",
    )
)
OF_CHAT, OF_TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Reply:
    """An answer, where a text alone does not say enough."""

    text: str
    finish: str = "stop"
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Asked:
    """A request for a completion."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]  # names in small letters

    @property
    def prompt(self):
        """A text, or a list of messages."""
        return self.body["messages"] if self.path == OF_CHAT else self.body["prompt"]

    @property
    def last(self):
        """The text, or that of the last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def seed(self):
        return self.body.get("seed")

    @property
    def content(self):
        """All that the answer follows from, as one text."""
        return json.dumps([self.path, self.body], sort_keys=True)


def words(asked):
    """The tokens of a prompt: its words."""
    texts = (
        [asked.prompt] if isinstance(asked.prompt, str) else [m["content"] for m in asked.prompt]
    )
    return sum(len(text.split()) for text in texts)


class ChatServer:
    """The server as a test sees it. `asked` and `answered` count by `Asked.content`."""

    def __init__(self, answer, *, faults=(), seed=0, model="stub", models=None, **more):
        faults = dict(faults)
        assert all(isinstance(one, int) or one in FAULTS for one in faults), faults
        assert sum(faults.values()) <= 1
        self.answer, self.faults, self.seed = answer, faults, seed
        self.model, self.models = model, [model] if models is None else models
        self.key = more.pop("key", None)  # without this API key: 401
        self.paths = more.pop("paths", (OF_CHAT, OF_TEXT))  # others: 404
        self.refuse = more.pop("refuse", lambda _: None)  # (status, message, *headers) of a refusal
        self.refuse_models = more.pop("refuse_models", None)  # a status
        self.count = more.pop("count", words)  # tokens of a prompt
        self.amend = more.pop("amend", lambda reply: reply)  # what is sent for a reply; or bytes
        self.head = more.pop("head", ())  # further lines of every answer's head
        self.delay = more.pop("delay", 0.0)  # seconds before each answer
        self.late = more.pop("late", 1.5)  # seconds of a hang
        self.retry_after = more.pop("retry_after", None)  # of 429 and 503
        assert not more, more
        self.requests = []  # every Asked, in the order of their coming
        self.asked, self.answered = Counter(), Counter()
        self.injected = Counter()
        self.tokens = 0  # prompts' and completions', of all answers that name them
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self._server = None
        self.port = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        """Listens, on the port it had before."""
        self._server = _Listener(("127.0.0.1", self.port), _Handler)
        self._server.stub = self
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def stop(self):
        """Ends every connection, and refuses new ones."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.end_connections()
            self._server = None

    def fault_of(self, asked, times):
        """What happens to a request that was made so many times before."""
        drawn = random.Random(f"{self.seed} {times} {asked.content}").random()
        for fault, rate in self.faults.items():
            drawn -= rate
            if drawn < 0:
                return fault
        return None

    def begin(self, asked):
        """Notes a request; its fault."""
        with self.lock:
            times = self.asked[asked.content]
            self.requests.append(asked)
            self.asked[asked.content] += 1
            fault = self.fault_of(asked, times)
            self.injected.update([] if fault is None else [fault])
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return fault

    def end(self):
        with self.lock:
            self.in_flight -= 1

    def reply(self, asked):
        """The whole answer to a request."""
        found = self.answer(asked)
        found = Reply(found) if isinstance(found, str) else found
        completion = found.completion_tokens
        prompt = self.count(asked)
        completion = len(found.text.split()) if completion is None else completion
        choice = {"index": 0, "finish_reason": found.finish}
        if asked.path == OF_CHAT:
            choice["message"] = {"role": "assistant", "content": found.text}
        else:
            choice["text"] = found.text
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage["total_tokens"] = prompt + completion
        return {"id": "1", "model": self.model, "choices": [choice], "usage": usage}

    def note(self, asked, reply, fault):
        """Counts an answer that is sent, and whether it can be used."""
        with self.lock:
            self.answered[asked.content] += fault is None
            self.tokens += reply.get("usage", {}).get("total_tokens", 0)


@contextmanager
def chat_server(answer, **settings):
    """A ChatServer that listens."""
    stub = ChatServer(answer, **settings)
    stub.start()
    try:
        yield stub
    finally:
        stub.stop()


class _Listener(ThreadingHTTPServer):
    """Knows its connections, so that they can be ended."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments):
        self.open = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def end_connections(self):
        for connection in list(self.open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended by itself

    def handle_error(self, *_):
        """Says nothing: a client that went away is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        stub = self.server.stub
        if self.path != "/v1/models":
            return self._send(404, {"detail": "Not Found"})
        if self._is_stranger():
            return self._send(401, self._told())
        if stub.refuse_models:
            return self._send(stub.refuse_models, {"detail": "no list"})
        listed = {"object": "list", "data": [{"id": one} for one in stub.models]}
        return self._send(200, stub.amend(listed))

    def do_POST(self):
        stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.path, body, headers)
        if self.path not in stub.paths:
            return self._send(404, {"detail": "Not Found"})
        if self._is_stranger():
            return self._send(401, self._told())
        fault = stub.begin(asked)
        try:
            time.sleep(stub.delay)
            return self._answer(stub, asked, fault)
        finally:
            stub.end()

    def _answer(self, stub, asked, fault):
        refused = stub.refuse(asked)
        if refused is not None:
            return self._send(refused[0], {"error": {"message": refused[1]}}, *refused[2:])
        if isinstance(fault, int):
            return self._send(fault, {"error": {"message": f"injected {fault}"}})
        if fault in {"hang", "drop"}:
            time.sleep(stub.late if fault == "hang" else 0)
            self.close_connection = True
            return None
        if str(fault).startswith("slow"):
            return self._trickle(fault)
        reply = _spoiled(stub.reply(asked), fault)
        sent = stub.amend(reply)
        payload = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        if fault in {"cut", "half"}:
            sent, length = payload[: len(payload) // 2], fault == "cut" and len(payload)
            # Said, or the client may ask again here: in vain, and unseen by this server.
            self._write(200, sent, "Connection: close", length=length)
            self.close_connection = True
            return None
        if fault == "garbage":
            return self._write(200, b"<html>\xff\xfe out of order</html>")
        stub.note(asked, reply, fault)  # before it is sent: who has it may look at once
        return self._write(200, payload)

    def _trickle(self, fault):
        """What never becomes an answer: a head, a body, or a welcome before any head."""
        begins = b"HTTP/1.1 200 Said\r\nContent-Length: 100000\r\n"
        first, then = {
            "slow head": (begins + b"X-Slow: ", b"x"),
            "slow body": (begins + b"\r\n", b" "),
            "slow welcome": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        }[fault]
        self.wfile.write(first)
        end = time.monotonic() + self.server.stub.late
        while time.monotonic() < end:
            self.wfile.write(then)
            time.sleep(0.01)
        self.close_connection = True

    def _is_stranger(self):
        key = self.server.stub.key
        return key is not None and self.headers["Authorization"] != f"Bearer {key}"

    def _told(self):
        """As some servers do: the key that was given is in the answer."""
        said = f"Incorrect API key provided: {self.headers['Authorization']}"
        return {"error": {"message": said}}

    def _send(self, status, value, *headers):
        self._write(status, json.dumps(value).encode(), *headers)

    def _write(self, status, payload, *headers, length=False):
        """All at once; a length may be stated that is not the payload's."""
        head = [f"HTTP/1.1 {status} Said", "Content-Type: application/json"]
        head += [*self.server.stub.head, *headers]
        head.append(f"Content-Length: {length or len(payload)}")
        if status in {429, 503} and self.server.stub.retry_after is not None:
            head.append(f"Retry-After: {self.server.stub.retry_after}")
        self.wfile.write("\r\n".join([*head, "", ""]).encode() + payload)

    def log_message(self, *_):
        """Says nothing."""


def _spoiled(reply, fault):
    """The answer, as a fault leaves it."""
    if fault == "no usage":
        del reply["usage"]
    elif fault == "no choices":
        reply["choices"] = []
    elif fault == "two choices":
        reply["choices"] *= 2
    elif fault == "no finish":
        reply["choices"][0]["finish_reason"] = None
    elif fault == "other model":
        reply["model"] = "another/model"
    return reply
