"""Runs each prompt once without a gradient, and its completions from copies of its states.

Layers that carry a state (convolutions, delta rules, scans) take no tree of completions, and some
attention takes no mask from outside. Both continue a text from the states that transformers caches.
Prompts are padded on the left, because padding after a prompt would decay its states, and
completions on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schemas.rows import Tree
from .copies import all_on_device, on_device

# Of a state's norm, in the first layer that has states. On a CPU correct states are off by 3e-7 at
# most, in any dtype, and dropped ones by 0.1 to 0.9; kernels of a GPU compute them in bfloat16.
STATE_TOLERANCE = 0.03
MOST_ROWS = 32  # of a pass: a hybrid of 4B keeps about 50 MiB for each, however short


def prompts_once(
    decoder: Any, trees: Sequence[Tree], device: torch.device, *, at_once: int, kept: int
) -> Iterator[tuple[list[int], Tensor]]:
    """Branches, as indices in the order tree, branch, and the states that predict their tokens.

    A pass has at most `at_once` tokens and MOST_ROWS rows, and continues from states of at most
    `kept` tokens; a single prompt or branch may have more.
    """
    count = iter(range(sum(len(tree.branches) for tree in trees)))
    numbered = [(tree, [next(count) for _ in tree.branches]) for tree in trees]
    numbered.sort(key=lambda one: len(one[0].prompt))
    # Long prompts run alone, without a mask; short ones are faster together.
    for group in _groups([len(tree.prompt) for tree, _ in numbered], at_once // 2):
        ids, seen = _padded([tree.prompt for tree, _ in numbered[group]], device, on_left=True)
        first, states = _run_prompts(decoder, ids, seen)
        branches = [
            (row, index, branch)
            for row, (tree, indices) in enumerate(numbered[group])
            for index, branch in zip(indices, tree.branches, strict=True)
        ]
        branches.sort(key=lambda one: len(one[2]))
        sizes = [len(branch) for *_, branch in branches]
        chunks = list(_groups(sizes, at_once, before=ids.shape[1], kept=kept))
        for chunk in chunks:
            rows = np.array([row for row, *_ in branches[chunk]])
            prompt_of = on_device(rows, device)
            own = states if chunk is chunks[-1] else deepcopy(states)
            own.reorder_cache(prompt_of)
            hidden = first[prompt_of.to(first.device)]
            # The last token predicts nothing.
            fed, real = _padded([branch[:-1] for *_, branch in branches[chunk]], device)
            if fed.shape[1]:
                more = _run_more(decoder, own, fed, torch.cat([seen[prompt_of], real], 1))
                hidden = torch.cat([hidden, more], 1)
            is_token = np.arange(hidden.shape[1]) < np.array(sizes[chunk])[:, None]
            predictors = on_device(np.flatnonzero(is_token), hidden.device)
            yield [index for _, index, _ in branches[chunk]], hidden.flatten(0, 1)[predictors]


def _run_prompts(decoder: Any, ids: Tensor, seen: Tensor) -> tuple[Tensor, Any]:
    """The last hidden states of prompts, (prompts, 1, hidden), and the cache of their states."""
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    out = decoder(input_ids=ids, attention_mask=seen, position_ids=positions, use_cache=True)
    return out.last_hidden_state[:, -1:], out.past_key_values


def _run_more(decoder: Any, states: Any, ids: Tensor, seen: Tensor) -> Tensor:
    """Hidden states of tokens (rows, length) that continue from states, which they change.

    `seen` is the mask of all tokens, with those that left the states.
    """
    positions = (seen.cumsum(1) - 1)[:, -ids.shape[1] :]
    hidden: Tensor = decoder(
        input_ids=ids,
        attention_mask=seen,
        position_ids=positions,
        past_key_values=states,
        use_cache=True,
    ).last_hidden_state
    return hidden


def require_carried_states(decoder: Any, trees: Sequence[Tree], device: torch.device) -> None:
    """Refuses layers that drop or change a state between the passes of a prompt and a completion.

    In half precision their log-probs may be within the tolerance. The states of the first such
    layer are nearly exact in any dtype, as nothing was rounded before it.
    """
    prompts = [tree.prompt for tree in trees]
    # A single token would run by other code.
    more = [np.concatenate(tree.branches)[:2] for tree in trees]
    ids, seen = _padded(prompts, device, on_left=True)
    _, states = _run_prompts(decoder, ids, seen)
    ids, real = _padded(more, device)
    _run_more(decoder, states, ids, torch.cat([seen, real], 1))
    for row, text in enumerate(zip(prompts, more, strict=True)):
        _, whole = _run_prompts(decoder, *_padded([np.concatenate(text)], device))
        for found, expected in zip(_first_states(states), _first_states(whole), strict=True):
            off = (found[row] - expected[0]).float().norm()
            if not off <= STATE_TOLERANCE * expected[0].float().norm():
                raise ValueError("its layers do not carry states from a prompt to a completion")


def _first_states(cache: Any) -> list[Tensor]:
    """The states of the first layer that has any besides keys and values, each (rows, ...)."""
    for layer in cache.layers:
        kinds = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
        if found := [state for kind in kinds for state in kind.values() if state is not None]:
            return found
    return []


def _groups(
    sizes: Sequence[int], at_once: int, *, before: int = 0, kept: int | None = None
) -> Iterator[slice]:
    """Consecutive groups of ascending sizes, each padded to its last, within these limits."""
    start = 0
    for stop, size in enumerate([*sizes[1:], None], 1):
        rows = stop + 1 - start
        if (
            size is None
            or rows > MOST_ROWS
            or rows * size > at_once
            or (kept is not None and rows * (before + size) > kept)
        ):
            yield slice(start, stop)
            start = stop


def _padded(
    rows: Sequence[NDArray[np.int32]], device: torch.device, *, on_left: bool = False
) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, each (rows, longest) int64."""
    grids = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for at, row in enumerate(rows):
        tokens = slice(grids.shape[2] - len(row), None) if on_left else slice(0, len(row))
        grids[:, at, tokens] = row, np.ones_like(row)
    ids, seen = all_on_device(list(grids), device)
    return ids, seen
