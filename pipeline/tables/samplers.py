"""Samplers: a model in this process, or one behind a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...schemas.config import Config, ModelOptions, ScoringOptions
from ...schemas.data_options import TokenOptions
from ...schemas.errors import UsageError
from ...schemas.round_options import SampleOptions, ServerOptions
from ...schemas.rows import BadRow, Role, TextRow
from ...schemas.samples import (
    SERVER,
    Prompt,
    Refused,
    Sample,
    Sampler,
    Sampling,
    Wanted,
)
from ...stages.data.cells import Wrapping
from ...stages.storage.answers import Answers
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.locations import is_remote
from ...stages.tracking.progress import Progress
from ..jobs.object_inputs import local_options
from ..parts import Part

if TYPE_CHECKING:  # both import transformers, which a server does without
    from ...stages.data.tokenizer import TextTokenizer
    from ...stages.model.generate import Generator


ANSWERS_AT_ONCE = 512  # of a local model: several batches, so that few of them are not full


def require_kept(part: Part | None, output: str, answers: str, setting: str) -> None:
    """Refuses answers in a store, and a part whose answers no other machine would see."""
    if is_remote(answers) or (part and is_remote(output) and not answers):
        raise UsageError(
            f"{setting}: answers are kept on a disk, and {answers or output} is none. Name a "
            f"folder that all parts see: --set {setting}=DIR."
        )


def unknown(
    answers: Answers, keys: Sequence[str], *, sampler: Sampler, progress: Progress
) -> Iterator[list[str]]:
    """The keys without an answer, group by group; the others advance the progress.

    Before each group the answers of other processes are read: nothing is paid for twice. A local
    model fills its batches from a group; a server is sent all requests side by side.
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


def sampler_of(
    model: ModelOptions, tokens: TokenOptions, server: ServerOptions, scoring: ScoringOptions
) -> Sampler:
    """The server, if one is named; else the model, whose folder may be in an object store."""
    require_sampled_model(model, server)
    if not server.url:
        return LocalSampler(local_options(model), tokens, scoring.tokens_per_batch)
    from ...stages.server.server_sampler import ServerSampler

    if not model.path:
        return ServerSampler(server)
    from ...stages.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(local_options(model).path, tokens)
    return ServerSampler(server, lambda prompt: len(_ids(prompt, tokenizer)))


def require_sampled_model(model: ModelOptions, server: ServerOptions) -> None:
    """Refuses settings that name no model which samples can be drawn from."""
    if server.url:
        require_openai()
    elif not model.path:
        raise UsageError(
            "No model to sample from. Pass --model DIR, or --server URL for one behind a server."
        )


def require_openai() -> None:
    """Refuses to ask a server without the package of its client."""
    if find_spec("openai") is None:
        raise UsageError(
            "server.url needs the package openai. Install it: "
            "pip install 'align-cached-reference[server]'"
        )


def wrapping_of(config: Config) -> Wrapping:
    """The wrapping of plain-text prompts; without a model folder, no template is looked at."""
    wrap, model = config.data.wrap, config.model
    if not (model.path and Wrapping.of(wrap).is_chat):
        return Wrapping.of(wrap)
    from ...stages.data.tokenizer import load_tokenizer

    folder = local_options(model).path
    return load_tokenizer(folder, config.tokens).wrapping(wrap)


def sampling_of(options: SampleOptions) -> Sampling:
    """The sampling parameters of the settings."""
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )


class LocalSampler(Sampler):
    """A model folder; its weights are loaded once something is drawn."""

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
        """The device it computes on."""
        return self._reference.device

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer, where the model has a bound."""
        return self._reference.context()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer.chat is not None

    def identity(self) -> Mapping[str, str]:
        """Digests of the model, its tokenizer and template, and how tokens are drawn."""
        from ...stages.data.tokenizer import tokenizer_fingerprint
        from ...stages.model.generate import SAMPLING_VERSION

        found = dict(self._reference.identity())
        del found["numerics.head"]  # scores are not computed
        return {
            **found,
            **tokenizer_fingerprint(self._tokenizer),
            "sampling.stops": " ".join(map(str, sorted(self._stops))),
            "numerics.sampling": SAMPLING_VERSION,
        }

    def fitted(self, prompt: Prompt) -> Prompt:
        """The prompt with its calls of tools in the form that the chat template writes."""
        try:
            text_row = self._tokenizer.fitted(_text_row(prompt))
        except BadRow:  # it is among the refused
            return prompt
        return replace(prompt, text=text_row.prompt, tools=text_row.tools)

    def refused(self, prompts: Sequence[Prompt], sampling: Sampling) -> Mapping[str, BadRow]:
        """Prompts that fill the model's context, or fail in its template."""
        found: dict[str, BadRow] = {}
        context = self.context
        most = None if context is None else context - sampling.max_new_tokens
        for prompt in prompts:
            try:
                length = len(self.ids_of(prompt))
                if most is not None and length > most:
                    raise BadRow("too_long", f"{length:,} tokens, and there is room for {most:,}")
            except BadRow as bad:
                found[prompt.key] = bad
        return found

    def ids_of(self, prompt: Prompt) -> list[int]:
        """The prompt as stage 1 renders it for an assistant that is about to answer."""
        return _ids(prompt, self._tokenizer)

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

    def likeliest(self, prompts: Sequence[Sequence[int]], most: int) -> list[tuple[str, bool]]:
        """The answer to each prompt, always the likeliest token, and whether it ended by itself."""
        from ...stages.model.generate import PromptTokens

        asked = [PromptTokens(ids, [0]) for ids in prompts]
        opened = self.open(Sampling(temperature=0.0, max_new_tokens=most))
        drawn = {one.prompt: one for batch in opened.generator.draw(asked) for one in batch}
        every = (drawn[index] for index in range(len(asked)))
        return [(self.text_of(one.tokens), one.has_stopped) for one in every]


@dataclass(frozen=True)
class OpenLocalSampler:
    """A model that is loaded."""

    sampler: LocalSampler
    generator: Generator
    sampling: Sampling

    def sample(self, wanted: Sequence[Wanted]) -> Iterator[Sequence[Sample | Refused]]:
        """Yields the refusals, then the samples of each batch."""
        from ...stages.model.generate import PromptTokens
        from ...stages.model.keyed_noise import stream_of

        refused = self.sampler.refused([one.prompt for one in wanted], self.sampling)
        if refused:
            yield [
                Refused(one.prompt.key, number, refused[one.prompt.key].detail)
                for one in wanted
                for number in one.numbers
                if one.prompt.key in refused
            ]
        rest = [one for one in wanted if one.prompt.key not in refused]
        seed = self.sampling.seed
        asked = [
            PromptTokens(
                self.sampler.ids_of(one.prompt),
                [stream_of(one.prompt.key, seed, number) for number in one.numbers],
            )
            for one in rest
        ]
        for batch in self.generator.draw(asked):
            yield [
                Sample(
                    prompt=rest[drawn.prompt].prompt.key,
                    number=rest[drawn.prompt].numbers[drawn.stream],
                    text=self.sampler.text_of(drawn.tokens),
                    finish="stop" if drawn.has_stopped else "length",
                    prompt_tokens=len(asked[drawn.prompt].ids),
                    completion_tokens=len(drawn.tokens) + drawn.has_stopped,
                )
                for drawn in batch
            ]


def _ids(prompt: Prompt, tokenizer: TextTokenizer) -> list[int]:
    from ...stages.data.encode import encode_prompt

    if not isinstance(prompt.text, str):
        tokenizer.require_template()
    return encode_prompt(_text_row(prompt), tokenizer)


def _text_row(prompt: Prompt) -> TextRow:
    """A row with the prompt and some answer to it."""
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
