"""Samples of a model behind a server with OpenAI's interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...schemas.errors import AlignError, BudgetError, ServerError, UsageError, counted
from ...schemas.round_options import ServerOptions
from ...schemas.rows import BadRow
from ...schemas.samples import SERVER, Prompt, Refused, Sample, Sampler, Sampling, Wanted
from .completions import (
    LIMIT,
    NEWER_LIMIT,
    TEXT,
    Completion,
    body_of,
    field,
    path_of,
    read_completion,
    seed_of,
    text_in,
)
from .in_flight import in_groups
from .server_client import (
    GivenUpError,
    RequestRefusedError,
    ServerClient,
    ServerCosts,
    shortened,
)

CountTokens = Callable[[Prompt], int]


class ServerSampler(Sampler):
    """A model behind a server, identified by its name and the revision that the user gives."""

    device = SERVER

    def __init__(self, options: ServerOptions, count_tokens: CountTokens | None = None) -> None:
        if not options.revision:
            raise UsageError(
                "server.revision is empty. A server tells no digest of its weights, so answers are "
                "kept under the model's name and what you call the weights: a commit, a date, "
                "`round-3`. State it, and state another one whenever the weights are others."
            )
        self.costs = ServerCosts()
        self._options = options
        self._count_tokens = count_tokens
        self._model = options.model

    def identity(self) -> Mapping[str, str]:
        """The model's name and revision, without the server's address."""
        return {"server_model": self.model(), "server_revision": self._options.revision}

    def model(self) -> str:
        """The given name, or that of the only model that the server lists."""
        if not self._model:
            with ServerClient(self._options, self.costs) as client:
                try:
                    names = client.get("/models", _listed)
                except ServerError as error:
                    raise ServerError(f"{error} Or name the model: server.model.") from error
                self._model = _only_one(names, client.address)
        return self._model

    def open(self, sampling: Sampling) -> OpenServer:
        """The sampler; no request is sent yet."""
        return OpenServer(self._options, sampling, self.model(), self.costs, self._count_tokens)


@dataclass(frozen=True)
class _Task:
    """One sample to request."""

    prompt: Prompt
    key: str
    number: int
    tokens: int | None  # of the prompt, if we can count them
    refusal: str  # why it cannot be requested; empty: it can


class OpenServer:
    """A server that gives samples under one set of sampling options."""

    def __init__(
        self,
        options: ServerOptions,
        sampling: Sampling,
        model: str,
        costs: ServerCosts,
        count_tokens: CountTokens | None,
    ) -> None:
        self._options = options
        self._sampling = sampling
        self._model = model
        self._costs = costs
        self._count_tokens = count_tokens
        self._lock = threading.Lock()
        self._takes_settings: dict[str, str] = {}  # the server's reply to them, by path
        self._limit = LIMIT  # what it calls the most tokens of an answer

    def sample(self, wanted: Sequence[Wanted]) -> Iterator[Sequence[Sample | Refused]]:
        """Yields samples as they arrive; at most `concurrency` answers are not yet yielded."""
        asked = sum(len(one.numbers) for one in wanted)
        kept = refused = 0
        with ServerClient(self._options, self._costs) as client:
            groups: Iterator[list[Sample | Refused]] = in_groups(
                self._tasks(wanted),
                partial(self._asked, client),
                most=self._options.concurrency,
                stop=client.stopping.set,
            )
            try:
                for group in groups:
                    yield group
                    given = sum(isinstance(one, Sample) for one in group)
                    kept, refused = kept + given, refused + len(group) - given
            except AlignError as error:
                raise type(error)(f"{error} {_way_on(kept)}") from error
        if asked > kept + refused:
            raise self._spent(asked - kept - refused, kept)

    def _spent(self, missing: int, kept: int) -> BudgetError:
        return BudgetError(
            f"server.max_tokens of {self._options.max_tokens:,} is spent: "
            f"{self._costs.prompt_tokens:,} tokens were read and "
            f"{self._costs.completion_tokens:,} written; {counted(missing, 'answers')} still to "
            f"buy. {_way_on(kept)}"
        )

    def _tasks(self, wanted: Sequence[Wanted]) -> Iterator[_Task]:
        """All tasks, or as many as the budget allows."""
        most = self._options.max_tokens
        for one in wanted:
            key = one.prompt.key
            refusal, tokens = self._looked_at(one.prompt)
            for number in one.numbers:
                if most and self._costs.tokens >= most:
                    return
                yield _Task(one.prompt, key, number, tokens, refusal)

    def _looked_at(self, prompt: Prompt) -> tuple[str, int | None]:
        """The reason that a prompt cannot be sent, if any, and its number of tokens."""
        messages = () if isinstance(prompt.text, str) else prompt.text
        if messages and messages[-1].get("role") == "assistant":
            return "the assistant's own words are last: servers answer only to others", None
        try:
            return "", self._count_tokens(prompt) if self._count_tokens else None
        except BadRow as bad:
            return bad.detail, None

    def _asked(self, client: ServerClient, task: _Task) -> Sample | Refused | None:
        """A sample, or the reason that there is none; None if the run was stopped."""
        if task.refusal:
            return Refused(task.key, task.number, task.refusal)
        seed = seed_of(self._sampling.seed, task.key, task.number)
        try:
            found = self._completed(client, task.prompt, self._sampling, seed)
        except GivenUpError:
            return None
        except RequestRefusedError as error:
            self._require_settings_taken(client, path_of(task.prompt))
            return Refused(task.key, task.number, str(error))
        _require_same_count(task, found)
        return Sample(
            prompt=task.key,
            number=task.number,
            text=found.text,
            finish=found.finish,
            prompt_tokens=found.prompt_tokens,
            completion_tokens=found.completion_tokens,
        )

    def _completed(
        self, client: ServerClient, prompt: Prompt, sampling: Sampling, seed: int
    ) -> Completion:
        limit = self._limit
        body = body_of(prompt, sampling, model=self._model, seed=seed, limit=limit)
        read = partial(read_completion, costs=self._costs)
        try:
            return client.post(path_of(prompt), body, read)
        except RequestRefusedError as error:
            if limit == NEWER_LIMIT or NEWER_LIMIT not in str(error):
                raise
        self._limit = NEWER_LIMIT  # models that take only this one name it
        return self._completed(client, prompt, sampling, seed)

    def _require_settings_taken(self, client: ServerClient, path: str) -> None:
        """Sends a plain prompt once, to tell refused settings from a refused prompt."""
        with self._lock:
            if path not in self._takes_settings:
                text = "Once upon a time"
                plain = Prompt(text if path == TEXT else ({"role": "user", "content": text},))
                try:
                    self._completed(client, plain, replace(self._sampling, max_new_tokens=1), 0)
                    self._takes_settings[path] = ""
                except RequestRefusedError as error:
                    self._takes_settings[path] = str(error)
            said = self._takes_settings[path]
        if said:
            names = ", ".join(body_of(Prompt(""), self._sampling, model="", seed=0))
            raise UsageError(
                f"{client.address}{path} refuses every request: {said}. It was sent {names}: leave "
                "out what it does not know."
            )


def _require_same_count(task: _Task, found: Completion) -> None:
    if task.tokens is not None and task.tokens != found.prompt_tokens:
        raise UsageError(
            f"The server read {found.prompt_tokens:,} tokens where our rendering of the prompt has "
            f"{task.tokens:,}: it has another chat template or another tokenizer (prompt "
            f"{task.key}). Start it with the template of this model, or name the model that it has."
        )


def _way_on(kept: int) -> str:
    return f"{counted(kept, 'answers')} of this run are kept: the same command goes on from there."


def _listed(answer: Any) -> list[str]:
    return [text_in(one, "id") for one in field(answer, "data", list)]


def _only_one(names: Sequence[str], address: str) -> str:
    if len(names) == 1:
        return names[0]
    listed = shortened(", ".join(map(repr, names))) or "no model"
    raise UsageError(f"{address} lists {listed}. Name the one to ask: server.model.")
