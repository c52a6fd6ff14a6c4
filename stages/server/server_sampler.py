"""Samples of a model behind a server with OpenAI's interface, by the client of `openai`.

The client sends a request again after a time-out, a lost connection, 408, 409, 429 and 5xx, with
growing pauses or the server's Retry-After. Here is what a paid run needs beside that: a bounded
number of requests in flight, each answer handed over before the next request begins, another
request after an answer that cannot be read, a budget in tokens, and errors that name the setting.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx2
import openai

from ...schemas.errors import AlignError, BudgetError, ServerError, UsageError, counted, logger
from ...schemas.json_codec import digest
from ...schemas.round_options import ServerOptions
from ...schemas.rows import BadRow, Message
from ...schemas.safe_text import bare_address, mask_secret, mask_secrets_of, safe
from ...schemas.samples import SERVER, Finish, Prompt, Refused, Sample, Sampler, Sampling, Wanted

NEWER_LIMIT = "max_completion_tokens"
MOST_SAID = 300  # characters of a server's own words
_NO_KEY = "none"  # the client requires one, and is told not to send it
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds, as the client pauses
_OF_THIS_PROMPT = frozenset((400, 413, 422))
_SENT_AGAIN = frozenset((408, 409, 429))  # and 5xx
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
# A server of this machine is asked past any proxy that the environment names.
_PAST_PROXIES: Mapping[str, None] = {
    f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")
}
_UNFINISHED = frozenset((None, "abort", "error"))  # of vLLM and SGLang, for requests they gave up
# The number of requests that were sent for the sample of the current task.
_sent: ContextVar[int] = ContextVar("sent", default=0)

CountTokens: TypeAlias = Callable[[Prompt], int]
Outcome: TypeAlias = Sample | Refused


class ServerSampler(Sampler):
    """A model behind a server, identified by its name and the revision that the user gives."""

    device = SERVER

    def __init__(self, options: ServerOptions, count_tokens: CountTokens | None = None) -> None:
        if not options.revision:
            raise UsageError(
                "server.revision is empty. A server tells no digest of its weights, so name them: "
                "a commit, a date, `round-3`; another one whenever the weights are others."
            )
        self.options = options
        self.settings = _client_settings(options)
        has_key = self.settings["api_key"] != _NO_KEY
        self.headers = {} if has_key else {"Authorization": openai.Omit()}
        self.count_tokens = count_tokens
        self.tokens = 0  # read and written, and what lost answers may have cost
        self.limit = "max_tokens"  # what the server calls the most tokens of an answer
        self._model = options.model

    def identity(self) -> Mapping[str, str]:
        """The model's name and revision, without the server's address."""
        return {"server_model": self.model(), "server_revision": self.options.revision}

    def model(self) -> str:
        """The given name, or that of the only model that the server lists."""
        if self._model:
            return self._model
        url = self.options.url
        try:
            http = openai.DefaultHttpxClient(mounts=_PAST_PROXIES)
            with openai.OpenAI(
                **self.settings, timeout=self.options.timeout, http_client=http
            ) as client:
                names = [one.id for one in client.models.list(extra_headers=self.headers).data]
        except (openai.OpenAIError, AttributeError, TypeError, ValueError) as error:
            failure = _failure(error, self.options)
            raise type(failure)(f"{failure} Or name the model: server.model.") from None
        if len(names) != 1:
            listed = ", ".join(map(repr, names)) or "no model"
            raise UsageError(f"{url} lists {listed}. Name the one to ask: server.model.")
        self._model = names[0]
        return self._model

    def open(self, sampling: Sampling) -> OpenServer:
        """The sampler; no request is sent yet."""
        return OpenServer(self, sampling)


class OpenServer:
    """A server that gives samples under one set of sampling options."""

    def __init__(self, sampler: ServerSampler, sampling: Sampling) -> None:
        self._sampler = sampler
        self._options = sampler.options
        self._sampling = sampling

    def sample(self, wanted: Sequence[Wanted]) -> Iterator[Sequence[Outcome]]:
        """Yields samples as they arrive; at most `concurrency` answers are not yet yielded.

        What was yielded counts as in flight until the next group is asked for. After an error no
        request is begun, and what is in flight is yielded before the error is raised.
        """
        rest = iter([(one.prompt, number) for one in wanted for number in one.numbers])
        missing = sum(len(one.numbers) for one in wanted)
        kept = 0
        budget = self._options.max_tokens
        in_flight: set[Future[Outcome]] = set()
        error: BaseException | None = None
        with self._connection() as ask:
            while True:
                while len(in_flight) < self._options.concurrency and not error:
                    is_spent = budget and self._sampler.tokens >= budget
                    asked = None if is_spent else next(rest, None)
                    if asked is None:
                        break
                    in_flight.add(ask(*asked))
                if not in_flight:
                    break
                done, in_flight = wait(in_flight, return_when=FIRST_COMPLETED)
                for one in done:
                    error = error or one.exception()
                group = [one.result() for one in done if not one.exception()]
                missing -= len(group)
                kept += sum(isinstance(one, Sample) for one in group)
                if group:
                    yield group

        resume = f"Kept: {counted(kept, 'answers')}; the same command resumes."
        if isinstance(error, AlignError):
            raise type(error)(f"{error} {resume}") from None
        if error:
            raise error
        if missing:
            raise BudgetError(
                f"server.max_tokens of {budget:,} is spent, on {self._sampler.tokens:,} tokens; "
                f"{counted(missing, 'answers')} still to buy. {resume}"
            )

    @contextmanager
    def _connection(self) -> Iterator[Callable[[Prompt, int], Future[Outcome]]]:
        """Sends requests from an event loop in a thread of its own.

        In the main thread, asyncio would swallow a signal that arrives in one of its callbacks.
        """
        http = _http_client(self._options.timeout, self._count_lost)
        client = openai.AsyncOpenAI(**self._sampler.settings, timeout=None, http_client=http)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        def ask(prompt: Prompt, number: int) -> Future[Outcome]:
            return asyncio.run_coroutine_threadsafe(self._ask(client, prompt, number), loop)

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await client.close()

        try:
            yield ask
        finally:
            asyncio.run_coroutine_threadsafe(end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _count_lost(self) -> None:
        self._sampler.tokens += self._sampling.max_new_tokens

    async def _ask(self, client: openai.AsyncOpenAI, prompt: Prompt, number: int) -> Outcome:
        """A sample, or the reason that there is none."""
        key, text, count_tokens = prompt.key, prompt.text, self._sampler.count_tokens
        if not isinstance(text, str) and text[-1].get("role") == "assistant":
            reason = "the assistant's own words are last: servers answer only to others"
            return Refused(key, number, reason)
        try:
            tokens = count_tokens(prompt) if count_tokens else None
        except BadRow as bad:
            return Refused(key, number, bad.detail)

        unread, pause = 0, FIRST_PAUSE
        while True:
            try:
                sample = self._read(await self._answer(client, prompt, number), key, number)
            except openai.APIStatusError as error:
                if error.status_code in _OF_THIS_PROMPT:
                    return Refused(key, number, _said_in(error))
                raise _failure(error, self._options, _sent.get()) from None
            except openai.OpenAIError as error:
                raise _failure(error, self._options, _sent.get()) from None
            except (AttributeError, TypeError, ValueError) as error:  # an answer of another form
                unread += 1
                if unread > self._options.retries:
                    raise _failure(error, self._options, _sent.get()) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if tokens not in {None, sample.prompt_tokens}:
                raise UsageError(
                    f"The server read {sample.prompt_tokens:,} tokens where our rendering of the "
                    f"prompt has {tokens:,}: it has another chat template or another tokenizer "
                    f"(prompt {key}). Start it with the template of this model, or name the model "
                    "that it has."
                )
            return sample

    async def _answer(self, client: openai.AsyncOpenAI, prompt: Prompt, number: int) -> Any:
        """The answer to one request; parameters of only some servers are in it only if set."""
        sampling, limit = self._sampling, self._sampler.limit
        more: dict[str, Any] = {limit: sampling.max_new_tokens}
        if sampling.top_k:
            more["top_k"] = sampling.top_k
        if prompt.template_options:
            more["chat_template_kwargs"] = dict(prompt.template_options)
        body: dict[str, Any] = {
            "model": self._sampler.model(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed_of(sampling.seed, prompt.key, number),
            "extra_body": more,
            "extra_headers": self._sampler.headers,
        }
        if prompt.tools:
            body["tools"] = [*prompt.tools]
        try:
            if isinstance(prompt.text, str):
                return await client.completions.create(**body, prompt=prompt.text)
            messages: Any = [*map(_with_text_arguments, prompt.text)]
            return await client.chat.completions.create(**body, messages=messages)
        except openai.BadRequestError as error:
            if limit == NEWER_LIMIT or NEWER_LIMIT not in str(error.body):
                raise
        if self._sampler.limit != NEWER_LIMIT:
            self._sampler.limit = NEWER_LIMIT
            logger.warning("The server takes %s in place of %s.", NEWER_LIMIT, limit)
        return await self._answer(client, prompt, number)

    def _read(self, answer: Any, key: str, number: int) -> Sample:
        """The only completion in an answer, whose cost is counted first."""
        read, written = answer.usage.prompt_tokens, answer.usage.completion_tokens
        if not all(type(count) is int and 0 <= count < 1 << 31 for count in (read, written)):
            raise ValueError(f"its counts of tokens are {read!r} and {written!r}")
        self._sampler.tokens += read + written
        (choice,) = answer.choices
        text = choice.message.content if hasattr(choice, "message") else choice.text
        text = "" if text is None else text  # as it is beside a call of a tool
        if choice.finish_reason in _UNFINISHED or not isinstance(text, str):
            raise ValueError(f"no whole answer; its finish_reason is {choice.finish_reason}")
        text.encode()  # half of a surrogate pair cannot be kept
        finish = _FINISHES.get(choice.finish_reason, "other")
        return Sample(key, number, text, finish, read, written)


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Bounds each request as a whole, and counts those whose answer may have been paid and lost."""

    def __init__(self, seconds: float, count_lost: Callable[[], None]) -> None:
        # The requests in flight are bounded already; none waits here while its time runs.
        super().__init__(timeout=None, mounts=_PAST_PROXIES, limits=httpx2.Limits())
        self._seconds = seconds
        self._count_lost = count_lost

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        """Sends a request and reads its answer."""
        _sent.set(_sent.get() + 1)
        try:
            return await asyncio.wait_for(super().send(request, **how), self._seconds)
        except TimeoutError:
            self._count_lost()
            text = f"no answer in {self._seconds:g} s (server.timeout)"
            raise httpx2.ReadTimeout(text, request=request) from None
        except (httpx2.ReadError, httpx2.RemoteProtocolError):
            self._count_lost()
            raise


def _http_client(seconds: float, count_lost: Callable[[], None]) -> _BoundedClient:
    try:
        return _BoundedClient(seconds, count_lost)
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(
            f"The proxy or the certificates that the environment names cannot be used ({error}). "
            "See to HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and SSL_CERT_FILE."
        ) from error


def _client_settings(options: ServerOptions) -> dict[str, Any]:
    """The address and the key, which is masked from now on."""
    mask_secrets_of(options.url)
    try:
        parts = urlsplit(options.url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or options.url != bare_address(options.url):
        raise UsageError(
            f"server.url {bare_address(options.url)!r} is not an address such as "
            "http://127.0.0.1:8000/v1, without a user, a query or a fragment. The key belongs "
            "into the environment variable that server.key_variable names."
        )
    key = os.environ.get(options.key_variable, "").strip()
    mask_secret(key)
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(f"{options.key_variable} is no API key: it has other than plain letters.")
    return {"base_url": options.url, "api_key": key or _NO_KEY, "max_retries": options.retries}


def seed_of(sampling_seed: int, prompt: str, number: int) -> int:
    """The seed of one sample: 31 bits, which every server takes."""
    return int(digest(["seed", sampling_seed, prompt, number])[:8], 16) >> 1


def _with_text_arguments(message: Message) -> dict[str, Any]:
    """A message for OpenAI's interface, which has the arguments of calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls} if calls else dict(message)


def _failure(error: Exception, options: ServerOptions, requests: int = 0) -> AlignError:
    """The error that ends a run, for one of a request."""
    status, said = getattr(error, "status_code", 500), _said_in(error)
    if status >= 500 or status in _SENT_AGAIN:
        tried = "it lists no models"
        if requests:
            tried = f"{counted(requests, 'requests')} without a usable answer; the last time"
        return ServerError(f"{options.url}: {tried}: {said}. See to the server.")
    if status in {401, 403}:
        state = "has another" if os.environ.get(options.key_variable) else "is not set"
        way_out = f"Put its API key into {options.key_variable}, which {state}."
    else:
        way_out = (
            "See that server.url ends as the server says (often /v1) and that it has the model. If "
            "it completes no plain text, give it conversations: prompts that are lists of messages."
        )
    return UsageError(f"{options.url}: {said}. {way_out}")


def _said_in(error: Exception) -> str:
    """The beginning of an error's own words, safe to show."""
    words: Any = f"an answer that cannot be read as one of OpenAI's interface ({error})"
    if isinstance(error, openai.APIConnectionError):
        words = f"{error} {error.__cause__ or ''}"
    elif isinstance(error, openai.APIStatusError):
        words = error.body  # which OpenAI and others, such as FastAPI, word in their own ways
        if isinstance(words, dict):
            words = words.get("message") or words.get("detail") or words
        words = f"{error.status_code} {words}"
    said = safe(" ".join(words.split()))
    return said if len(said) <= MOST_SAID else f"{said[:MOST_SAID]}…"
