"""Samples from a model behind a server with OpenAI's API, through the `openai` client.

The client repeats a request after a timeout, a lost connection, 408, 409, 429 and 5xx. It waits
with growing pauses, or for the server's Retry-After. This module adds the needs of a paid run: a
bounded number of requests in flight, each answer yielded before the next request starts, a new
request after an unreadable answer, a budget in tokens, and errors that name the setting.
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
import numpy as np
import openai

from ...schemas.columns import Ragged
from ...schemas.errors import AlignError, BudgetError, ServerError, UsageError, counted, logger
from ...schemas.json_codec import digest
from ...schemas.round_options import ServerOptions
from ...schemas.rows import BadRow, Message, Tree
from ...schemas.safe_text import bare_address, mask_secret, mask_secrets_of, safe
from ...schemas.samples import (
    SERVER,
    Finish,
    Prompt,
    Refused,
    Sample,
    Sampler,
    SampleRequest,
    Sampling,
)

NEWER_LIMIT = "max_completion_tokens"
LONGEST_MESSAGE = 300  # characters of a server's error that are shown
_NO_KEY = "none"  # the client requires a key; the headers leave it out
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds, as in the client
_PROMPT_ERRORS = frozenset((400, 413, 422))  # the prompt is refused; other prompts may work
_RETRIED = frozenset((408, 409, 429))  # the client repeats these, and 5xx
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
# A server on this machine is reached directly, without the proxies of the environment.
_NO_PROXIES: Mapping[str, None] = {
    f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")
}
_UNFINISHED = frozenset((None, "abort", "error"))  # vLLM and SGLang gave up the request
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)  # not an answer of OpenAI's API
# The number of requests that were sent for the sample of the current task.
_sent: ContextVar[int] = ContextVar("sent", default=0)

CountTokens: TypeAlias = Callable[[Prompt], int]
Outcome: TypeAlias = Sample | Refused


class ServerSampler(Sampler):
    """A model behind a server, identified by its name and server.revision."""

    device = SERVER
    keeps = True  # answers are stored, so that the same command resumes

    def __init__(self, options: ServerOptions, count_tokens: CountTokens | None = None) -> None:
        if not options.revision:
            raise UsageError(
                "server.revision is empty, and a server gives no digest of its weights. Set it to "
                "a name of the weights, such as a date, and change it whenever they change."
            )
        self.options = options
        self.settings = _client_settings(options)
        has_key = self.settings["api_key"] != _NO_KEY
        self.headers = {} if has_key else {"Authorization": openai.Omit()}
        self.count_tokens = count_tokens
        self.tokens = 0  # read and written, with the highest possible cost of lost answers
        self.limit = "max_tokens"  # the request's field for the most tokens of an answer
        self._model = options.model

    def identity(self) -> Mapping[str, str]:
        """The model's name and revision, without the server's address."""
        return {"server_model": self.model(), "server_revision": self.options.revision}

    def model(self) -> str:
        """The name in the settings, or that of the only model on the server."""
        if self._model:
            return self._model
        url = self.options.url
        try:
            with self._client() as client:
                names = [one.id for one in client.models.list(extra_headers=self.headers).data]
        except (openai.OpenAIError, *_UNREADABLE) as error:
            failure = _failure(error, self.options)
            raise type(failure)(f"{failure} Or set server.model to the model's name.") from None
        if len(names) != 1:
            listed = ", ".join(map(repr, names)) or "no model"
            raise UsageError(f"{url} lists {listed}. Set server.model to the model to use.")
        self._model = names[0]
        return self._model

    def _client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(mounts=_NO_PROXIES)
        return openai.OpenAI(**self.settings, timeout=self.options.timeout, http_client=http)

    def token_logps(self, trees: Sequence[Tree]) -> Ragged | None:
        """Log p of every completion token of trees; None if the server gives none.

        Token ids are sent as a prompt, which the server repeats with log-probs (echo).
        """
        found = list[Sequence[float]]()
        how: dict[str, Any] = {"model": self.model(), "extra_headers": self.headers}
        how |= {"echo": True, "logprobs": 1, "max_tokens": 1}
        with self._client() as client:
            for prompt, branch in ((tree.prompt, one) for tree in trees for one in tree.branches):
                ids = [*prompt.tolist(), *branch.tolist()]
                # The first answer shows whether the server can: llama.cpp's 500 is not repeated.
                asking: Any = client if found else client.with_options(max_retries=0)
                try:
                    answer = asking.completions.create(**how, prompt=ids)
                    logps = answer.choices[0].logprobs.token_logprobs[len(prompt) : len(ids)]
                    if answer.usage.prompt_tokens != len(ids) or len(logps) != len(branch):
                        raise ValueError(f"{answer.usage.prompt_tokens} tokens for {len(ids)} ids")
                except (openai.OpenAIError, *_UNREADABLE) as error:
                    if found or isinstance(error, openai.APIConnectionError):
                        raise _failure(error, self.options, 1) from None
                    logger.warning("No log-probs of prompts by the server: %s", _message_of(error))
                    return None
                found.append(logps)
        return Ragged.of(found, np.float32)

    def open(self, sampling: Sampling) -> OpenServer:
        """The sampler; no request is sent yet."""
        return OpenServer(self, sampling)


class OpenServer:
    """A server that gives samples under one set of sampling options."""

    def __init__(self, sampler: ServerSampler, sampling: Sampling) -> None:
        self._sampler = sampler
        self._options = sampler.options
        self._sampling = sampling

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Sequence[Outcome]]:
        """Yields samples as they arrive; at most `concurrency` requests are in flight.

        A yielded group counts as in flight until the next group is taken. After an error no new
        request starts, and the requests in flight are yielded before the error is raised.
        """
        unsent = iter([(one.prompt, number) for one in requests for number in one.numbers])
        missing = sum(len(one.numbers) for one in requests)
        kept = 0
        budget = self._options.max_tokens
        in_flight: set[Future[Outcome]] = set()
        error: BaseException | None = None
        with self._connection() as send:
            while True:
                while len(in_flight) < self._options.concurrency and not error:
                    is_spent = budget and self._sampler.tokens >= budget
                    following = None if is_spent else next(unsent, None)
                    if following is None:
                        break
                    in_flight.add(send(*following))
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

        resume = f" Kept: {counted(kept, 'answers')}; the same command resumes."
        resume = resume if self._sampler.keeps else ""
        if isinstance(error, AlignError):
            raise type(error)(f"{error}{resume}") from None
        if error:
            raise error
        if missing:
            raise BudgetError(
                f"server.max_tokens of {budget:,} is spent after {self._sampler.tokens:,} tokens, "
                f"and {counted(missing, 'answers')} are missing.{resume}"
            )

    @contextmanager
    def _connection(self) -> Iterator[Callable[[Prompt, int], Future[Outcome]]]:
        """A function that sends a request from an event loop in another thread.

        In the main thread, asyncio would swallow a signal that arrives in one of its callbacks.
        """
        try:
            http = _BoundedClient(self._options.timeout, self._count_lost)
        except (ValueError, OSError, ImportError) as error:
            raise UsageError(
                f"The proxy or the certificates of the environment cannot be used: {error}. Check "
                "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and SSL_CERT_FILE."
            ) from error
        client = openai.AsyncOpenAI(**self._sampler.settings, timeout=None, http_client=http)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        def send(prompt: Prompt, number: int) -> Future[Outcome]:
            return asyncio.run_coroutine_threadsafe(self._sample(client, prompt, number), loop)

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await client.close()

        try:
            yield send
        finally:
            asyncio.run_coroutine_threadsafe(end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _count_lost(self) -> None:
        self._sampler.tokens += self._sampling.max_new_tokens

    async def _sample(self, client: openai.AsyncOpenAI, prompt: Prompt, number: int) -> Outcome:
        """One sample, or the reason why the model cannot make it."""
        key, text, count_tokens = prompt.key, prompt.text, self._sampler.count_tokens
        if not isinstance(text, str) and text[-1].get("role") == "assistant":
            reason = "its last message is the assistant's, which servers do not continue"
            return Refused(key, number, reason)
        try:
            tokens = count_tokens(prompt) if count_tokens else None
        except BadRow as bad:
            return Refused(key, number, bad.detail)

        unreadable, pause = 0, FIRST_PAUSE
        while True:
            try:
                sample = self._read(await self._request(client, prompt, number), key, number)
            except openai.APIStatusError as error:
                if error.status_code in _PROMPT_ERRORS:
                    return Refused(key, number, _message_of(error))
                raise _failure(error, self._options, _sent.get()) from None
            except openai.OpenAIError as error:
                raise _failure(error, self._options, _sent.get()) from None
            except _UNREADABLE as error:
                unreadable += 1
                if unreadable > self._options.retries:
                    raise _failure(error, self._options, _sent.get()) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if tokens not in {None, sample.prompt_tokens}:
                raise UsageError(
                    f"The server counts {sample.prompt_tokens:,} tokens in prompt {key}, and "
                    f"the tokenizer of model.path counts {tokens:,}: their chat templates or "
                    "tokenizers differ. Start the server with the template of model.path, or set "
                    "model.path to the server's model."
                )
            return sample

    async def _request(self, client: openai.AsyncOpenAI, prompt: Prompt, number: int) -> Any:
        """The server's answer to one request."""
        sampling, limit = self._sampling, self._sampler.limit
        # Fields that not every server accepts are sent only if they are set.
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
            logger.warning("The server requires %s instead of %s.", NEWER_LIMIT, limit)
        return await self._request(client, prompt, number)

    def _read(self, answer: Any, key: str, number: int) -> Sample:
        """The only completion of an answer; its tokens count even if the rest is unreadable."""
        read, written = answer.usage.prompt_tokens, answer.usage.completion_tokens
        if not all(type(count) is int and 0 <= count < 1 << 31 for count in (read, written)):
            raise ValueError(f"its token counts are {read!r} and {written!r}")
        self._sampler.tokens += read + written
        (choice,) = answer.choices
        text = choice.message.content if hasattr(choice, "message") else choice.text
        text = "" if text is None else text  # None beside a tool call
        if choice.finish_reason in _UNFINISHED or not isinstance(text, str):
            raise ValueError(f"it is not complete; its finish_reason is {choice.finish_reason}")
        text.encode()  # raises on half of a surrogate pair, which cannot be stored
        finish = _FINISHES.get(choice.finish_reason, "other")
        return Sample(key, number, text, finish, read, written)


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Limits the time of each whole request, and counts lost answers that may be paid for."""

    def __init__(self, seconds: float, count_lost: Callable[[], None]) -> None:
        # No limit on connections: a request must not wait here while its time runs.
        super().__init__(timeout=None, mounts=_NO_PROXIES, limits=httpx2.Limits())
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


def _client_settings(options: ServerOptions) -> dict[str, Any]:
    """The client's address, API key and retries; the key is masked in all output from now on."""
    mask_secrets_of(options.url)
    try:
        parts = urlsplit(options.url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or options.url != bare_address(options.url):
        raise UsageError(
            f"server.url {bare_address(options.url)!r} is not an address such as "
            "http://127.0.0.1:8000/v1, without user, query or fragment. Correct it; an API key "
            "goes into the environment variable of server.key_variable."
        )
    key = os.environ.get(options.key_variable, "").strip()
    mask_secret(key)
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"{options.key_variable} is not an API key: it has a character that is not printable "
            "ASCII. Correct it."
        )
    return {"base_url": options.url, "api_key": key or _NO_KEY, "max_retries": options.retries}


def seed_of(sampling_seed: int, prompt: str, number: int) -> int:
    """The seed of one sample: 31 bits, which every server accepts."""
    return int(digest(["seed", sampling_seed, prompt, number])[:8], 16) >> 1


def _with_text_arguments(message: Message) -> dict[str, Any]:
    """A message for OpenAI's API, which expects the arguments of tool calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls} if calls else dict(message)


def _failure(error: Exception, options: ServerOptions, requests: int = 0) -> AlignError:
    """The error that ends the command because of a failed request."""
    status, message = getattr(error, "status_code", 500), _message_of(error)
    if status >= 500 or status in _RETRIED:
        failed = "the list of its models failed"
        if requests:
            failed = f"{counted(requests, 'requests')} failed, the last"
        return ServerError(f"{options.url}: {failed} with: {message}. Check the server.")
    if status in {401, 403}:
        state = "has another value" if os.environ.get(options.key_variable) else "is not set"
        remedy = f"Set {options.key_variable}, which {state}, to the server's API key."
    else:
        remedy = (
            "Check that server.url has the server's path, often /v1, and that the server has the "
            "model. A server without plain-text completion needs prompts that are conversations."
        )
    return UsageError(f"{options.url}: {message}. {remedy}")


def _message_of(error: Exception) -> str:
    """The start of an error's message, safe to show."""
    message: Any = f"an answer that is not of OpenAI's API ({error})"
    if isinstance(error, openai.APIConnectionError):
        message = f"{error} {error.__cause__ or ''}"
    elif isinstance(error, openai.APIStatusError):
        message = error.body  # the key of its message is OpenAI's or that of FastAPI
        if isinstance(message, dict):
            message = message.get("message") or message.get("detail") or message
        message = f"{error.status_code} {message}"
    text = safe(" ".join(message.split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…"
