"""The client of a server, which retries requests that failed."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from ...schemas.errors import ServerError, UsageError, counted
from ...schemas.round_options import ServerOptions
from ...schemas.safe_text import bare_address, mask_secret, mask_secrets_of, safe

logger = logging.getLogger("align")

Answer = TypeVar("Answer")

FIRST_PAUSE = 0.5  # seconds before a request is sent again; twice as long each time
LONGEST_PAUSE = 30.0
LONGEST_ASKED_PAUSE = 300.0  # that a server asks for
LOGGED_PAUSE = 4.0
MOST_SAID = 300  # characters of an error's own words
_ONCE_MORE = frozenset((408, 409, 425, 429))
_OF_THIS_REQUEST = frozenset((400, 413, 422))
_NOT_THERE = {
    "/completions": " If it completes no plain text, give it conversations: prompts that are lists "
    "of messages.",
    "/models": " If it lists no models, name the one to ask: server.model.",
}


class BrokenAnswerError(Exception):
    """An answer that is incomplete or of another form: the request is sent again."""


class GivenUpError(Exception):
    """The request waited to be sent again when the run was stopped."""


class RequestRefusedError(Exception):
    """The server refuses the content of this request."""


class _FailedError(Exception):
    """A failed attempt."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause  # that the server asks for


@dataclass
class ServerCosts:
    """Counts of requests and of tokens read and written; any thread may add."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """The tokens read and written."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, **counts: int) -> None:
        """Adds to some of the counts."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class ServerClient:
    """A connection to a server, for any number of threads."""

    def __init__(self, options: ServerOptions, costs: ServerCosts) -> None:
        self.address = _checked_address(options.url)
        self.stopping = threading.Event()  # no request is sent again from now on
        self._options = options
        self._costs = costs
        self._http = _http_of(options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._http.close()

    def get(self, path: str, read: Callable[[Any], Answer]) -> Answer:
        """The result of `read` on the JSON answer of a GET request."""
        try:
            return self._ask("GET", path, None, read)
        except RequestRefusedError as error:
            raise UsageError(
                f"{self.address}{path}: {error}. See that server.url is right."
            ) from error

    def post(self, path: str, body: dict[str, Any], read: Callable[[Any], Answer]) -> Answer:
        """The result of `read` on the JSON answer of a POST request.

        RequestRefusedError if the server refuses its content.
        """
        return self._ask("POST", path, json.dumps(body).encode(), read)

    def _ask(
        self, method: str, path: str, body: bytes | None, read: Callable[[Any], Answer]
    ) -> Answer:
        for retry in range(self._options.retries + 1):
            try:
                return read(_json_of(self._content(method, path, body)))
            except (BrokenAnswerError, _FailedError) as error:
                failure = error
            if retry < self._options.retries:
                self._wait(path, retry, failure)
        requests = counted(self._options.retries + 1, "requests")
        raise ServerError(
            f"{self.address}{path}: {requests} without a usable answer; the last time: {failure}. "
            "See to the server."
        )

    def _wait(self, path: str, retry: int, failure: Exception) -> None:
        """Waits with exponential backoff and jitter."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(retry, 16)) * random.uniform(0.5, 1)
        pause = max(pause, getattr(failure, "pause", 0.0))
        if pause >= LOGGED_PAUSE:
            text = "%s%s: %s. Sent again in %.0f s."
            logger.warning(text, self.address, path, failure, pause)
        if self.stopping.wait(pause):
            raise GivenUpError
        self._costs.add(retries=1)

    def _content(self, method: str, path: str, body: bytes | None) -> bytes:
        """The body of an answer with the status 200."""
        self._costs.add(requests=1)
        try:
            answer = self._http.request(method, f"{self.address}{path}", content=body)
        except (httpx2.RequestError, OSError) as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _FailedError(shortened(said)) from error
        if answer.status_code != 200:
            raise self._refusal(path, answer)
        return answer.content

    def _refusal(self, path: str, answer: httpx2.Response) -> Exception:
        """The error for an answer other than 200."""
        status = answer.status_code
        text = f"{status} {said_in(answer.content)}".rstrip()
        if status in _ONCE_MORE or status >= 500:
            return _FailedError(text, pause_of(answer.headers.get("Retry-After", "")))
        if status in _OF_THIS_REQUEST:
            return RequestRefusedError(text)
        where = f"{self.address}{path}: {text}."
        if status in {401, 403}:
            name = self._options.key_variable
            state = "has another" if os.environ.get(name) else "is not set"
            return UsageError(f"{where} Put its API key into {name}, which {state}.")
        return UsageError(
            f"{where} See that server.url ends as the server says (often /v1) and that it has the "
            f"model.{_NOT_THERE.get(path, '')}"
        )


def _json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise BrokenAnswerError(f"not JSON: {shortened(_text(content))!r}") from error


def said_in(content: bytes) -> str:
    """A server's own words about an error, safe to show."""
    try:
        said = json.loads(content)
        for name in ("error", "message", "detail"):
            said = said.get(name, said) if isinstance(said, dict) else said
        text = said if isinstance(said, str) else json.dumps(said)
    except ValueError:
        text = _text(content)
    return shortened(text)


def shortened(text: str) -> str:
    """The beginning of a server's message, safe to show."""
    text = safe(" ".join(text.split()))
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}…"


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _checked_address(url: str) -> str:
    mask_secrets_of(url)
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise UsageError(f"server.url: not an address: {error}.") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise UsageError(
            f"server.url {bare_address(url)!r} is not an address such as http://127.0.0.1:8000/v1."
        )
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise UsageError(
            f"server.url {bare_address(url)} has a user, a query or a fragment. Give the address "
            "alone, and the key in the environment variable that server.key_variable names."
        )
    return url.rstrip("/")


def _http_of(options: ServerOptions) -> httpx2.Client:
    headers = {"Content-Type": "application/json", **_key_header(options.key_variable)}
    limits = httpx2.Limits(max_connections=options.concurrency + 1)
    try:
        return httpx2.Client(headers=headers, timeout=options.timeout, limits=limits)
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(
            f"The proxy or the certificates that the environment names cannot be used ({error}). "
            "See to HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and SSL_CERT_FILE."
        ) from error


def _key_header(variable: str) -> dict[str, str]:
    key = os.environ.get(variable, "").strip()
    if not key:
        return {}
    mask_secret(key)
    if not key.isascii() or not key.isprintable():
        raise UsageError(
            f"{variable} holds what no API key has: only plain characters can be sent."
        )
    return {"Authorization": f"Bearer {key}"}


def pause_of(stated: str) -> float:
    """The seconds that Retry-After asks for, which may be a date; 0 if it cannot be parsed."""
    try:
        seconds = float(stated)
    except ValueError:
        try:
            when = parsedate_to_datetime(stated)
            seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            return 0.0
    return min(seconds, LONGEST_ASKED_PAUSE) if seconds > 0 else 0.0
