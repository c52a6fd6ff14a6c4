"""Makes samplers: a model in this process, or one behind a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...schemas.config import Config, ModelOptions
from ...schemas.data_options import TokenOptions
from ...schemas.errors import UsageError
from ...schemas.round_options import SampleOptions
from ...schemas.rows import BadRow, Role, TextRow
from ...schemas.samples import (
    SERVER,
    Prompt,
    Refused,
    Sample,
    Sampler,
    SampleRequest,
    Sampling,
)
from ...stages.data.cells import Wrapping
from ...stages.storage.answers import Answers
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.locations import is_remote
from ...stages.tracking.progress import Progress
from ..jobs.object_inputs import local_options
from ..parts import Part

if TYPE_CHECKING:  # both import transformers, which sampling from a server does not need
    from ...stages.data.tokenizer import TextTokenizer
    from ...stages.model.generate import Generator


ANSWERS_AT_ONCE = 512  # requested from a local model: many batches, of which few are not full


def require_local_answers(part: Part | None, output: str, answers: str, setting: str) -> None:
    """Refuses to store answers in a bucket, and parts without a common folder of answers."""
    if is_remote(answers) or (part and is_remote(output) and not answers):
        raise UsageError(
            f"{setting}: answers cannot be stored in the bucket {answers or output}. Name a folder "
            f"on a disk that all parts share: --set {setting}=DIR."
        )


def missing_groups(
    answers: Answers, keys: Sequence[str], *, sampler: Sampler, progress: Progress
) -> Iterator[list[str]]:
    """Yields the keys without an answer, group by group; other keys advance the progress.

    The answers of other processes are read before each group, so nothing is paid for twice. A
    group for a local model fills its batches; a server gets all keys as one group.
    """
    size = ANSWERS_AT_ONCE if sampler.device != SERVER else max(1, len(keys))
    for start in range(0, len(keys), size):
        group = keys[start : start + size]
        if answers.missing(group):
            answers.look()
        missing = answers.missing(group)
        progress.advance(len(group) - len(missing))
        if missing:
            yield missing


def sampler_of(config: Config) -> Sampler:
    """The server of the settings, or else their model, whose folder may be in a bucket."""
    require_sampled_model(config)
    if not config.server.url:
        model = local_options(config.model)
        return LocalSampler(model, config.tokens, config.scoring.tokens_per_batch)
    from ...stages.server.server_sampler import ServerSampler

    if not config.model.path:
        return ServerSampler(config.server)
    from ...stages.data.tokenizer import load_tokenizer

    folder = local_options(config.model, weights=False).path
    tokenizer = load_tokenizer(folder, config.tokens)
    return ServerSampler(config.server, lambda prompt: len(prompt_ids(prompt, tokenizer)))


def require_sampled_model(config: Config) -> None:
    """Refuses settings that name no model to sample from."""
    if config.server.url:
        require_openai()
    elif not config.model.path:
        raise UsageError(
            "There is no model to sample from. Name its folder by --model DIR, or its server by "
            "--server URL."
        )


def require_openai() -> None:
    """Refuses to use a server if the package of its client is not installed."""
    if find_spec("openai") is None:
        raise UsageError(
            "server.url needs the package openai. Install it: "
            "pip install 'align-cached-reference[server]'"
        )


def wrapping_of(config: Config) -> Wrapping:
    """The wrapping of plain-text prompts; only a model folder has a chat template for it."""
    wrap, model = config.data.wrap, config.model
    if not (model.path and Wrapping.of(wrap).is_chat):
        return Wrapping.of(wrap)
    from ...stages.data.tokenizer import load_tokenizer

    folder = local_options(model, weights=False).path
    return load_tokenizer(folder, config.tokens).wrapping(wrap)


def sampling_of(options: SampleOptions) -> Sampling:
    """The settings of sampling that determine a sample."""
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )


class LocalSampler(Sampler):
    """A model folder as a sampler; its weights are loaded when it is opened."""

    def __init__(self, model: ModelOptions, tokens: TokenOptions, tokens_per_batch: int) -> None:
        from ...stages.data.tokenizer import load_tokenizer
        from ...stages.model.generate import own_stops
        from ...stages.model.reference import HfReference

        self.model = model
        self._tokens_per_batch = tokens_per_batch
        self._reference = HfReference(model, own_digests())
        self._tokenizer = load_tokenizer(model.path, tokens)
        self._stops = self._tokenizer.stops.tokens | own_stops(model)

    @property
    def device(self) -> str:
        """The device that the model runs on."""
        return self._reference.device

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt with its answer; None if the model has no limit."""
        return self._reference.context()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer.chat is not None

    def identity(self) -> Mapping[str, str]:
        """Digests of the model, its tokenizer and template, and the version of sampling."""
        from ...stages.data.tokenizer import tokenizer_fingerprint
        from ...stages.model.generate import SAMPLING_VERSION

        found = dict(self._reference.identity())
        del found["numerics.head"]  # sampling computes no log-probs
        return {
            **found,
            **tokenizer_fingerprint(self._tokenizer),
            "sampling.stops": " ".join(map(str, sorted(self._stops))),
            "numerics.sampling": SAMPLING_VERSION,
        }

    def normalized(self, prompt: Prompt) -> Prompt:
        """The prompt with its tool calls in the form that the chat template expects."""
        try:
            text_row = self._tokenizer.normalized(_text_row(prompt))
        except BadRow:  # `refused` reports it
            return prompt
        return replace(prompt, text=text_row.prompt, tools=text_row.tools)

    def refused(self, prompts: Sequence[Prompt], sampling: Sampling) -> Mapping[str, BadRow]:
        """The prompts that do not fit the model's context, or fail in its template."""
        found: dict[str, BadRow] = {}
        context = self.context
        most = None if context is None else context - sampling.max_new_tokens
        for prompt in prompts:
            try:
                length = len(self.ids_of(prompt))
                if most is not None and length > most:
                    raise BadRow("too_long", f"{length:,} tokens, and {most:,} fit")
            except BadRow as bad:
                found[prompt.key] = bad
        return found

    def ids_of(self, prompt: Prompt) -> list[int]:
        """The token ids of the prompt as in stage 1, up to the start of the assistant's answer."""
        return prompt_ids(prompt, self._tokenizer)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a completion's tokens."""
        return self._tokenizer.continuation(tokens)

    def open(self, sampling: Sampling) -> OpenLocalSampler:
        """Loads the weights."""
        from ...stages.model.generate import Generator

        generator = Generator(
            self._reference.load(),
            sampling,
            self._stops,
            tokens_per_batch=self._tokens_per_batch,
            require_unchanged=self._reference.require_unchanged,
        )
        return OpenLocalSampler(self, generator, sampling)

    def greedy_answers(self, prompts: Sequence[Sequence[int]], most: int) -> list[tuple[str, bool]]:
        """The greedy answer to each prompt, and whether it ended before `most` tokens."""
        from ...stages.model.generate import PromptTokens

        opened = self.open(Sampling(temperature=0.0, max_new_tokens=most))
        answers = [("", False)] * len(prompts)
        for batch in opened.generator.draw([PromptTokens(ids, [0]) for ids in prompts]):
            for one in batch:
                answers[one.prompt] = self.text_of(one.tokens), one.has_stopped
        return answers


@dataclass(frozen=True)
class OpenLocalSampler:
    """A model folder with its weights loaded."""

    sampler: LocalSampler
    generator: Generator
    sampling: Sampling

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Sequence[Sample | Refused]]:
        """Yields all refusals, then the samples of each batch."""
        from ...stages.model.generate import PromptTokens
        from ...stages.model.keyed_noise import stream_of

        bad_rows = self.sampler.refused([one.prompt for one in requests], self.sampling)
        refused: list[Refused] = []
        possible: list[SampleRequest] = []
        prompts: list[PromptTokens] = []
        for one in requests:
            key = one.prompt.key
            if key in bad_rows:
                refused += [Refused(key, number, bad_rows[key].detail) for number in one.numbers]
                continue
            streams = [stream_of(key, self.sampling.seed, number) for number in one.numbers]
            prompts.append(PromptTokens(self.sampler.ids_of(one.prompt), streams))
            possible.append(one)
        if refused:
            yield refused
        for batch in self.generator.draw(prompts):
            samples = []
            for drawn in batch:
                request = possible[drawn.prompt]
                sample = Sample(
                    prompt=request.prompt.key,
                    number=request.numbers[drawn.stream],
                    text=self.sampler.text_of(drawn.tokens),
                    finish="stop" if drawn.has_stopped else "length",
                    prompt_tokens=len(prompts[drawn.prompt].ids),
                    completion_tokens=len(drawn.tokens) + drawn.has_stopped,
                )
                samples.append(sample)
            yield samples


def prompt_ids(prompt: Prompt, tokenizer: TextTokenizer, answer: str = "") -> list[int]:
    """The token ids of a prompt up to the start of the assistant's answer, and of an answer."""
    from ...stages.data.encode import encode_prompt

    if not isinstance(prompt.text, str):
        tokenizer.require_template()
    return encode_prompt(_text_row(prompt), tokenizer, answer)


def _text_row(prompt: Prompt) -> TextRow:
    """A row with the prompt and any completion, as the tokenizer expects."""
    answer = "x" if isinstance(prompt.text, str) else ({"role": "assistant", "content": "x"},)
    return TextRow(
        file=0,
        row=0,
        prompt=prompt.text,
        completions=(answer,),
        roles=(Role.CANDIDATE,),
        scores=(None,),
        tools=prompt.tools,
        template_options=prompt.template_options,
    )
