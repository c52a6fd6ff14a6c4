"""HTTP requests with a total deadline each, which also holds for slow answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self

import httpx2


class NoAnswerError(Exception):
    """No complete answer; the message says why."""


@dataclass(frozen=True)
class HttpAnswer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]  # case-insensitive names
    content: bytes


class TimedRequests:
    """A client that sends requests for any number of threads.

    They are made in an event loop of its own, because only there a deadline ends whatever a request
    waits for: a client that blocks has one for each read, and a byte now and then is a read.
    """

    def __init__(
        self, headers: Mapping[str, str], *, connections: int, seconds: float, most_bytes: int
    ) -> None:
        self._seconds, self._most_bytes = seconds, most_bytes
        self._client = httpx2.AsyncClient(
            # A few compressed bytes may decompress to gigabytes.
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=None,
            # A connection each: bytes after an answer would be read as the next request's.
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=0),
            follow_redirects=False,  # the API key is for one address only
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._lock = threading.Lock()
        self._asking: set[asyncio.Task[Any]] = set()
        self._is_over = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Cancels the requests in flight."""
        with self._lock:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def send(self, method: str, url: str, body: bytes | None) -> HttpAnswer:
        """The answer, of any status; NoAnswerError if there is none in time."""
        with self._lock:
            if self._loop.is_closed():
                raise NoAnswerError("given up")
            answer = asyncio.run_coroutine_threadsafe(self._asked(method, url, body), self._loop)
        return answer.result()

    async def _end(self) -> None:
        self._is_over = True
        # Their own tasks end with them: one that was cancelled before it began would be missed.
        for task in self._asking:
            task.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _asked(self, method: str, url: str, body: bytes | None) -> HttpAnswer:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._is_over:
            raise NoAnswerError("given up")
        task = asyncio.current_task()
        assert task, "it is run as one"
        self._asking.add(task)
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream(method, url, content=body, headers=headers) as response,
            ):
                content = await self._read(response)
        except TimeoutError as error:
            raise NoAnswerError(f"no whole answer in {self._seconds:g} s") from error
        except (httpx2.RequestError, OSError) as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        finally:
            self._asking.discard(task)
        return HttpAnswer(response.status_code, response.headers, content)

    async def _read(self, response: httpx2.Response) -> bytes:
        """The whole body, unless it is compressed or too large."""
        encoding = response.headers.get("Content-Encoding", "")
        if encoding.lower() not in {"", "identity"}:
            raise NoAnswerError(f"an answer in the encoding {encoding!r}, not asked for")
        content = bytearray()
        async with aclosing(response.aiter_raw()) as parts:
            async for part in parts:
                content += part
                if len(content) > self._most_bytes:
                    raise NoAnswerError(f"an answer of more than {self._most_bytes:,} bytes")
        return bytes(content)
