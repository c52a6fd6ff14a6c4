"""Draws completions with a loaded model by transformers' `generate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.samples import Sampling
from .keyed_noise import KeyedNoise
from .library_errors import is_out_of_memory
from .logprobs import causal_model, input_device
from .model_folder import read_json, text_settings
from .transformers_compat import quiet

_public: Any = transformers  # its stub names few of its classes

# A part of every sample's key; raised when the same key would give another sample.
SAMPLING_VERSION = "keyed-gumbel-1"


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as token ids, and the noise stream of each sample to draw."""

    ids: Sequence[int]
    streams: Sequence[int]


@dataclass(frozen=True)
class Drawn:
    """The tokens of one sample, without the stop token."""

    prompt: int  # index of its prompt
    stream: int  # index of its stream
    tokens: tuple[int, ...]
    has_stopped: bool  # False: it was truncated


class Generator:
    """A loaded model that draws samples."""

    def __init__(
        self,
        model: nn.Module,
        sampling: Sampling,
        stops: Collection[int],
        *,
        tokens_per_batch: int,
        require_unchanged: Callable[[], None] = lambda: None,
    ) -> None:
        """`require_unchanged` is called after each batch to refuse changed model files."""
        self._model: Any = causal_model(model)
        # The folder's other generation settings, such as a penalty, are not in a sample's key.
        self._model.generation_config = _public.GenerationConfig()
        self._sampling = sampling
        self._stops = sorted(stops)
        self._tokens_per_batch = tokens_per_batch
        self._require_unchanged = require_unchanged

    def draw(self, prompts: Sequence[PromptTokens]) -> Iterator[list[Drawn]]:
        """Yields all samples, batch by batch; a batch that does not fit is halved."""
        every = [
            (index, stream)
            for index, prompt in enumerate(prompts)
            for stream in range(len(prompt.streams))
        ]
        rows = deque(sorted(every, key=lambda row: (-len(prompts[row[0]].ids), *row)))
        while rows:
            width = len(prompts[rows[0][0]].ids) + self._sampling.max_new_tokens  # the longest
            batch = list(islice(rows, max(1, self._tokens_per_batch // width)))
            drawn = self._drawn(prompts, batch)
            if drawn is None:
                if len(batch) == 1:
                    raise UsageError(
                        f"Memory does not suffice for one sample of {width:,} tokens. Lower "
                        "--max-new-tokens, or use a device with more memory."
                    )
                self._tokens_per_batch = width * (len(batch) // 2)
                continue
            for _ in batch:
                rows.popleft()
            self._require_unchanged()
            yield drawn

    def _drawn(
        self, prompts: Sequence[PromptTokens], batch: Sequence[tuple[int, int]]
    ) -> list[Drawn] | None:
        """The samples of these prompts and streams; None if memory runs out."""
        ids, mask = left_padded(
            [prompts[prompt].ids for prompt, _ in batch], input_device(self._model)
        )
        streams = [prompts[prompt].streams[stream] for prompt, stream in batch]
        length, sampling = ids.shape[1], self._sampling
        processors = _public.LogitsProcessorList(warpers(sampling))
        if sampling.temperature:
            processors.append(KeyedNoise(streams, length, ids.device))
        settings = _public.GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._stops or None,
            pad_token_id=self._stops[0] if self._stops else None,
        )
        made: list[list[int]] | None = None
        try:
            with quiet(), torch.inference_mode():
                made = self._model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    logits_processor=processors,
                    generation_config=settings,
                )[:, length:].tolist()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if made is None:
            # Outside the handler: the traceback no longer keeps the failed batch alive.
            torch.cuda.empty_cache()
            return None
        drawn = []
        for (prompt, stream), tokens in zip(batch, made, strict=True):
            end = next((at for at, token in enumerate(tokens) if token in self._stops), None)
            drawn.append(Drawn(prompt, stream, tuple(tokens[:end]), end is not None))
        return drawn


def warpers(sampling: Sampling) -> list[Any]:
    """The logits warpers of the sampling options, in transformers' order."""
    made: list[Any] = []
    if sampling.temperature == 0:
        return made
    if sampling.temperature != 1:
        made.append(_public.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        made.append(_public.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        made.append(_public.TopPLogitsWarper(float(sampling.top_p)))
    return made


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, each (prompts, longest) int64; padding is token 0."""
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        ids[row, start:] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, start:] = 1
    return ids.to(device), mask.to(device)


def greedy_gaps(model: nn.Module, ids: Sequence[int], start: int) -> NDArray[np.float32]:
    """The nats by which each token from `start` on is below the most likely one at its place."""
    inputs = torch.tensor([ids], device=input_device(model))
    inner: Any = causal_model(model)
    with quiet(), torch.inference_mode():
        logits = inner(input_ids=inputs).logits[0, start - 1 : -1].float()  # (answer, vocabulary)
    own = logits.gather(1, inputs[0, start:, None].to(logits.device))[:, 0]
    gaps: NDArray[np.float32] = (logits.amax(1) - own).cpu().numpy()
    return gaps


def own_stops(options: ModelOptions) -> frozenset[int]:
    """The stop tokens of the model's folder."""
    stops = set[int]()
    for name in ("generation_config.json", "config.json"):
        file = Path(options.path) / name
        given = text_settings(read_json(file)).get("eos_token_id") if file.is_file() else None
        tokens = given if isinstance(given, list) else [given]
        for token in tokens:
            if token is None:
                continue
            if type(token) is not int or token < 0:
                raise UsageError(
                    f"{file}: eos_token_id is {given!r:.100}, but must be a token id or a list of "
                    "them. Correct the entry, or remove it."
                )
            stops.add(token)
    return frozenset(stops)
