"""Rows for the recurrent mixers of hybrid models, in batches of trees.

Attention can skip the tokens between a prompt and its completion; a convolution or a state cannot.
So every module that contains a convolution is called with one row per completion, which has its
prompt in front and padding behind. All other layers see a batch without copies and padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .tree_attention import TreeBatch


@dataclass(frozen=True)
class MixerRows:
    """The rows of a batch's completions, made of its segments: gaps, prompts and completions."""

    sizes: list[int]  # tokens of the segments; all are (rows * length) of the batch
    groups: list[list[tuple[int, int]]]  # rows of one call: segments of prompt, completion


def rows_for_mixers(model: Any, batch: TreeBatch) -> dict[str, Any]:
    """The argument that gives a model's mixers their rows; empty for a model without mixers."""
    if not hasattr(model, "has_mixers"):
        mixers = mixers_of(model)
        for mixer in mixers:
            mixer.forward = partial(_by_rows, mixer.forward)
        model.has_mixers = bool(mixers)
    if not model.has_mixers:
        return {}
    return {"mixer_rows": mixer_rows(batch)}


def gather_around_mixers(model: Any) -> None:
    """Lets ZeRO-3 gather all weights of a mixer around its call.

    It reads a convolution's weight without calling it, and ranks may call its layers unequally
    often: DeepSpeed gathers for calls alone, and waits for all ranks.
    """
    from deepspeed.utils.z3_leaf_module import (  # noqa: PLC0415 - slow to import
        set_z3_leaf_module,
    )

    for mixer in mixers_of(model):
        set_z3_leaf_module(mixer, flag=True)
        mixer.register_forward_pre_hook(_by_position, with_kwargs=True)


def _by_position(_mixer: nn.Module, args: Any, options: dict[str, Any]) -> Any:
    """A mixer's inputs with the states by position: DeepSpeed's hooks miss those by name.

    It would release the weights before the backward pass.
    """
    first = (options.pop("hidden_states"),) if "hidden_states" in options else ()
    return (*first, *args), options


def mixers_of(model: Any) -> list[nn.Module]:
    """The modules of the text decoder that contain a convolution over its tokens."""
    modules: list[nn.Module] = list(model.get_decoder().modules())
    return [one for one in modules if any(isinstance(part, nn.Conv1d) for part in one.children())]


def mixer_rows(batch: TreeBatch) -> MixerRows:
    """The rows of a batch; those of a call are at least half as long as its longest."""
    edges = [0, *chain(*batch.edges), batch.token_ids.numel()]
    sizes = [stop - start for start, stop in pairwise(edges)]
    rows: list[tuple[int, int]] = []
    prompt = 1  # segment 0 is the gap before the first tree
    for tree in batch.edges:
        rows += [(prompt, prompt + number) for number in range(1, len(tree) - 1)]
        prompt += len(tree)

    def length(row: tuple[int, int]) -> int:
        return sizes[row[0]] + sizes[row[1]]

    groups: list[list[tuple[int, int]]] = []
    for row in sorted(rows, key=length, reverse=True):
        if not groups or 2 * length(row) < length(groups[-1][0]):
            groups.append([])
        groups[-1].append(row)
    return MixerRows(sizes, groups)


def _by_rows(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,  # (rows, length, hidden)
    *args: Any,
    mixer_rows: MixerRows | None = None,  # None: a batch of plain rows
    **options: Any,
) -> Tensor:
    """A mixer's outputs for the trees of a batch: (rows, length, hidden).

    The rows are an argument, because gradient checkpointing calls layers again after the pass. They
    are split and joined, because a GPU would add up the gradients of an index in any order.
    """
    if mixer_rows is None:
        return forward(hidden_states, *args, **options)
    sizes, flat = mixer_rows.sizes, hidden_states.flatten(0, 1)
    segments = torch.split(flat, sizes)
    found: dict[int, Tensor] = {}
    for group in mixer_rows.groups:
        longest = sum(sizes[segment] for segment in group[0])
        padding = [longest - sizes[prompt] - sizes[own] for prompt, own in group]
        parts = [
            (segments[prompt], segments[own], flat.new_zeros(pad, flat.shape[1]))
            for (prompt, own), pad in zip(group, padding, strict=True)
        ]
        rows = torch.cat([*chain(*parts)]).view(len(group), longest, -1)
        outputs = forward(rows, *args, **options).unbind()
        for (prompt, own), pad, output in zip(group, padding, outputs, strict=True):
            of_prompt, found[own], _ = torch.split(output, [sizes[prompt], sizes[own], pad])
            found.setdefault(prompt, of_prompt)  # equal in all rows of a tree
    # A gap between trees has any states.
    joined = [found.get(number, segment) for number, segment in enumerate(segments)]
    return torch.cat(joined).view_as(hidden_states)
