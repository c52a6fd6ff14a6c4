"""A server with OpenAI's interface on loopback, that answers by a function and misbehaves at rates.

What happens to a request follows from what it asks and how often that was asked before: in whatever
order requests come, each meets the same faults.
"""

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Beside any HTTP status, each of which is a fault too.
FAULTS = frozenset(
    (
        "hang",  # no answer, for longer than any test waits
        "drop",  # the connection is closed
        "cut",  # and in the middle of the answer
        "half",  # the first half of the JSON, as if it were all
        "garbage",  # no JSON
        "no usage",
        "two choices",
    )
)
LATE = 300  # seconds
OF_CHAT, OF_TEXT, OF_MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"


@dataclass(frozen=True)
class Reply:
    """An answer, where a text alone does not say enough."""

    text: str | None
    finish: str = "stop"


@dataclass(frozen=True)
class Asked:
    """A request for a completion."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]  # names in small letters

    @property
    def texts(self):
        """Of the messages, or the one text."""
        if self.path == OF_TEXT:
            return [self.body["prompt"]]
        return [one["content"] for one in self.body["messages"]]

    @property
    def last(self):
        return self.texts[-1]

    @property
    def seed(self):
        return self.body.get("seed")

    @property
    def content(self):
        """All that the answer follows from, as one text."""
        return json.dumps([self.path, self.body], sort_keys=True)


@dataclass
class ChatServer:
    """The server as a test sees it. `asked` and `answered` count by `Asked.content`."""

    answer: Callable
    faults: dict = field(default_factory=dict)  # the share of requests that each meets
    model: str = "stub"
    key: str | None = None  # without this API key: 401
    paths: tuple = (OF_CHAT, OF_TEXT, OF_MODELS)  # others: 404
    refuse: Callable = lambda _: None  # (status, message, *headers) of a refusal
    amend: Callable = lambda reply: reply  # what is sent for a reply; or bytes
    delay: float = 0.0  # seconds before each answer
    retry_after: Any = None  # what errors ask for; by default as good as no pause

    def __post_init__(self):
        assert all(isinstance(one, int) or one in FAULTS for one in self.faults), self.faults
        self.requests = []  # every Asked, in the order of their coming
        self.asked, self.answered, self.injected = Counter(), Counter(), Counter()
        self.tokens = 0  # prompts' and completions', of all answers that name them
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.port = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        """Listens, on the port it had before."""
        self.listener = _Listener(("127.0.0.1", self.port), _Handler)
        self.listener.stub = self
        self.port = self.listener.server_address[1]
        threading.Thread(
            target=self.listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def stop(self):
        """Ends every connection, and refuses new ones."""
        self.listener.shutdown()
        self.listener.server_close()
        self.listener.end_connections()

    def begin(self, asked):
        """Notes a request; what happens to it."""
        with self.lock:
            times = self.asked[asked.content]
            self.requests.append(asked)
            self.asked[asked.content] += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            drawn = random.Random(f"1 {times} {asked.content}").random()
            for fault, rate in self.faults.items():
                drawn -= rate
                if drawn < 0:
                    self.injected[fault] += 1
                    return fault
        return None

    def reply(self, asked, fault):
        """The whole answer to a request, as a fault leaves it."""
        found = self.answer(asked)
        found = found if isinstance(found, Reply) else Reply(found)
        choice = {"index": 0, "finish_reason": found.finish}
        if asked.path == OF_CHAT:
            choice["message"] = {"role": "assistant", "content": found.text}
        else:
            choice["text"] = found.text
        prompt, completion = sum(map(words, asked.texts)), words(found.text or "")
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {
            "model": self.model,
            "choices": [choice] * (1 + (fault == "two choices")),
            **({} if fault == "no usage" else {"usage": usage}),
        }

    def note(self, asked, reply, fault):
        """Counts an answer that is sent, and whether it can be used."""
        with self.lock:
            self.answered[asked.content] += fault is None
            self.tokens += sum(reply.get("usage", {}).values())


def words(text):
    """The tokens of a text."""
    return len(text.split())


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
        self._unless_strange(self._list)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._unless_strange(self._complete, Asked(self.path, json.loads(body), headers))

    def _unless_strange(self, answer, *asked):
        stub, given = self.server.stub, self.headers["Authorization"]
        if self.path not in stub.paths:
            self._send(404, {"detail": "Not Found"})
        elif stub.key is not None and given != f"Bearer {stub.key}":
            # As some servers do: the key that was given is in the answer.
            self._send(401, {"error": {"message": f"Incorrect API key provided: {given}"}})
        else:
            answer(stub, *asked)

    def _list(self, stub):
        self._send(200, stub.amend({"object": "list", "data": [{"id": stub.model}]}))

    def _complete(self, stub, asked):
        fault = stub.begin(asked)
        try:
            time.sleep(stub.delay)
            self._answer(stub, asked, fault)
        finally:
            with stub.lock:
                stub.in_flight -= 1

    def _answer(self, stub, asked, fault):
        if (refused := stub.refuse(asked)) is not None:
            return self._send(refused[0], {"error": {"message": refused[1]}}, *refused[2:])
        if isinstance(fault, int):
            return self._send(fault, {"error": {"message": f"injected {fault}"}})
        if fault in {"hang", "drop"}:
            time.sleep(LATE if fault == "hang" else 0)
            self.close_connection = True
            return None
        if fault == "garbage":
            return self._write(200, b"<html>\xff\xfe out of order</html>")
        reply = stub.reply(asked, fault)
        sent = stub.amend(reply)
        payload = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        if fault in {"cut", "half"}:
            half, length = payload[: len(payload) // 2], fault == "cut" and len(payload)
            # Said, or the client may ask again here: in vain, and unseen by this server.
            self._write(200, half, "Connection: close", length=length)
            self.close_connection = True
            return None
        stub.note(asked, reply, fault)  # before it is sent: who has it may look at once
        return self._write(200, payload)

    def _send(self, status, value, *headers):
        self._write(status, json.dumps(value).encode(), *headers)

    def _write(self, status, payload, *headers, length=False):
        """All at once; a length may be stated that is not the payload's."""
        stub = self.server.stub
        head = [f"HTTP/1.1 {status} Said", "Content-Type: application/json", *headers]
        head.append(f"Content-Length: {length or len(payload)}")
        if status != 200:
            asked = stub.retry_after
            head.append("Retry-After-Ms: 1" if asked is None else f"Retry-After: {asked}")
        self.wfile.write("\r\n".join([*head, "", ""]).encode() + payload)

    def log_message(self, *_):
        """Says nothing."""
