"""Draws completions with a loaded model by transformers' `generate`; each prompt is computed once.

The cache of a batch of prompts, all but their last tokens, is repeated for the samples of each.
Some models keep a cache that cannot be repeated. Both ways are compared on seeded tokens first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError, counted
from ...schemas.rows import OutOfMemory
from ...schemas.samples import Sampling
from .keyed_noise import KeyedNoise
from .loading.model_folder import read_json, text_settings
from .loading.quiet import quiet
from .logprobs import causal_model, input_device
from .memory.live_memory import is_out_of_memory
from .path_search import TOLERANCE, reason
from .probe_rows import ordinary_tokens

logger = logging.getLogger("align")
_public: Any = transformers  # its stub names few of its classes

# A part of every sample's key: counts up when the same key would give another sample.
SAMPLING_VERSION = "keyed-gumbel-1"
_GENERATION_CONFIG = "generation_config.json"
_PROBE_LENGTHS = (9, 4)  # of two prompts, the second with padding
_PROBE_ROWS = (0, 0, 1)


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


@dataclass(frozen=True)
class _Row:
    prompt: int
    stream: int
    length: int  # of the prompt


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
        """`require_unchanged` is called after each batch, and refuses changed model files."""
        self._model: Any = causal_model(model)
        # The folder's other generation settings, such as a penalty, are no part of a sample's key.
        self._model.generation_config = _public.GenerationConfig()
        self._sampling = sampling
        self._stops = sorted(stops)
        self._tokens_per_batch = tokens_per_batch
        self._require_unchanged = require_unchanged
        with quiet(), torch.inference_mode():
            self.shares_prompts = _can_share_prompts(self._model)

    def draw(self, prompts: Sequence[PromptTokens]) -> Iterator[list[Drawn]]:
        """Yields all samples, batch by batch; a batch that does not fit is halved."""
        rows = deque(
            sorted(
                (
                    _Row(index, stream, len(prompt.ids))
                    for index, prompt in enumerate(prompts)
                    for stream in range(len(prompt.streams))
                ),
                key=lambda row: (-row.length, row.prompt, row.stream),
            )
        )
        while rows:
            most = max(1, self._tokens_per_batch // self._width(rows[0]))
            batch = list(islice(rows, most))  # the longest first
            try:
                drawn = self._drawn(prompts, batch)
            except OutOfMemory as error:
                self._halve(batch, error)
                continue
            for _ in batch:
                rows.popleft()
            self._require_unchanged()
            yield drawn

    def _width(self, longest: _Row) -> int:
        return longest.length + self._sampling.max_new_tokens

    def _halve(self, batch: list[_Row], error: OutOfMemory) -> None:
        if len(batch) == 1:
            raise UsageError(
                f"{error}: there is no memory for one sample of {self._width(batch[0]):,} tokens. "
                "Lower --max-new-tokens, or sample where there is more memory."
            ) from error
        self._tokens_per_batch = self._width(batch[0]) * (len(batch) // 2)

    def _drawn(self, prompts: Sequence[PromptTokens], batch: list[_Row]) -> list[Drawn]:
        used = list(dict.fromkeys(row.prompt for row in batch))
        indices = {prompt: index for index, prompt in enumerate(used)}
        ids, mask = left_padded([prompts[prompt].ids for prompt in used], self._device)
        streams = [prompts[row.prompt].streams[row.stream] for row in batch]
        repeated = [indices[row.prompt] for row in batch]
        try:
            with quiet(), torch.inference_mode():
                tokens = self._generated(ids, mask, repeated, streams).tolist()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return [
                Drawn(row.prompt, row.stream, *self._until_stop(drawn))
                for row, drawn in zip(batch, tokens, strict=True)
            ]
        # Outside the handler: the traceback no longer keeps the failed batch alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(f"no memory for a batch of {counted(len(batch), 'samples')}")

    @property
    def _device(self) -> torch.device:
        return input_device(self._model)

    def _generated(
        self, ids: Tensor, mask: Tensor, repeated: list[int], streams: list[int]
    ) -> Tensor:
        """New tokens of each row: (rows, T)."""
        length, sampling = ids.shape[1], self._sampling
        processors = _public.LogitsProcessorList(warpers(sampling))
        if sampling.temperature:
            processors.append(KeyedNoise(streams, length, ids.device))
        how = _plain(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._stops or None,
            pad_token_id=self._stops[0] if self._stops else None,
        )
        made: Tensor = _generate(
            self._model,
            ids,
            mask,
            repeated,
            shared=self.shares_prompts,
            generation_config=how,
            logits_processor=processors,
        )
        return made[:, length:]

    def _until_stop(self, tokens: list[int]) -> tuple[tuple[int, ...], bool]:
        stops = frozenset(self._stops)
        end = next((index for index, token in enumerate(tokens) if token in stops), None)
        return tuple(tokens[:end]), end is not None


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


def _generate(
    model: Any, ids: Tensor, mask: Tensor, repeated: list[int], *, shared: bool, **how: Any
) -> Any:
    """The output of `generate`, with prompt `repeated[i]` in row i."""
    rows = torch.tensor(repeated, device=ids.device)
    if shared and ids.shape[1] > 1 and len(repeated) > len(ids):
        how["past_key_values"] = _cache_of(model, ids[:, :-1], mask[:, :-1], rows)
    return model.generate(input_ids=ids[rows], attention_mask=mask[rows], **how)


def _cache_of(model: Any, ids: Tensor, mask: Tensor, rows: Tensor) -> Any:
    """The key-value cache of the prompts, repeated for their rows.

    `generate` fills it as in its own first step; the token that it generates is not in it.
    """
    how = _plain(max_new_tokens=1, return_dict_in_generate=True)
    cache = model.generate(input_ids=ids, attention_mask=mask, generation_config=how)
    cache.past_key_values.reorder_cache(rows)
    return cache.past_key_values


def _plain(**settings: Any) -> Any:
    return _public.GenerationConfig(do_sample=False, **settings)


def _can_share_prompts(model: Any) -> bool:
    """Whether sampling from a shared prompt cache gives the same scores as without one."""
    difference = _sharing_difference(model)
    if isinstance(difference, float) and difference <= TOLERANCE[model.dtype]:
        return True
    logger.warning(
        "Sampling computes each prompt once for every sample of it, which is slower, because the "
        "cache of this model cannot be repeated (%s).",
        reason(difference),
    )
    return False


def _sharing_difference(model: Any) -> float | Exception:
    """The largest relative difference of the scores of two tokens, or the error."""
    draw = np.random.default_rng(0)
    known = ordinary_tokens(model.config)
    prompts = [draw.choice(known, length).tolist() for length in _PROBE_LENGTHS]
    ids, mask = left_padded(prompts, input_device(model))
    how = _plain(max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
    try:
        alone, shared = (
            _generate(model, ids, mask, [*_PROBE_ROWS], shared=shared, generation_config=how)
            for shared in (False, True)
        )
    except Exception as error:  # caches of models refuse in any way they like
        return error
    alike = alone.sequences[:, -2] == shared.sequences[:, -2]  # else the second has another past
    worst = [
        float((one - other).abs().max() / one.abs().max().clamp(min=1))
        for one, other in (
            (alone.logits[0], shared.logits[0]),
            (alone.logits[1][alike], shared.logits[1][alike]),
        )
        if len(one)
    ]
    return max(worst)


def own_stops(options: ModelOptions) -> frozenset[int]:
    """The stop tokens of the model's folder."""
    return frozenset(
        token
        for name in (_GENERATION_CONFIG, "config.json")
        for token in _tokens_in(options.path, name)
    )


def _tokens_in(folder: str, name: str) -> list[int]:
    file = Path(folder) / name
    given = text_settings(read_json(file)).get("eos_token_id") if file.is_file() else None
    tokens = given if isinstance(given, list) else [given]
    if any(token is not None and not (type(token) is int and token >= 0) for token in tokens):
        raise UsageError(
            f"{file}: eos_token_id is {given!r:.100}, and must be a token's number or a list of "
            "them. Correct the entry, or take it out."
        )
    return [token for token in tokens if token is not None]
