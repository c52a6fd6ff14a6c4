"""Chooses how a model is scored, for both stages.

A probe compares the fast layouts and heads with the model's own logits, and takes the fastest that
agrees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .head.fused_head import output_head
from .layouts.flex_attention import why_no_flex
from .logprobs import (
    ScoringPath,
    causal_model,
    gpus_of,
    input_device,
    own_attention,
    tree_logps,
)
from .memory.live_memory import is_out_of_memory
from .probe_rows import probe_trees

logger = logging.getLogger("align")

# Fastest first; DEFINITION is what they are compared with.
PATHS = (
    ScoringPath("flex", "fused", 0.0),
    ScoringPath("packed", "fused", 0.0),
    ScoringPath("tree", "fused", 0.0),
    ScoringPath("plain", "fused", 0.0),
    ScoringPath("tree", "exact", 0.0),
)
DEFINITION = ScoringPath("plain", "exact", 0.0)
# float32: nats per sequence. Half precision: mean nats per token, because the model's own logits
# are rounded there (bfloat16 steps by 1/16 at logits of 8 to 16, float16 by 1/128).
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}

Agree: TypeAlias = Callable[[bool], bool]  # whether what holds here holds on every rank
# The difference of a path from the model's own numbers, or the error of the path.
Measure: TypeAlias = Callable[[ScoringPath], float | Exception]


@dataclass(frozen=True)
class PathOptions:
    """What a model may be scored with."""

    no_flex: str = ""  # why FlexAttention may not be used, if it may not
    compile: bool = False  # the decoder layers

    @staticmethod
    def of(model: ModelOptions, config: Any = None) -> PathOptions:
        """Those of the settings of a model; `config` is that of one that learns with dropout."""
        return PathOptions(why_no_flex(model.attention, config), model.compile)


ANY_PATH = PathOptions()


def choose_path(
    model: nn.Module, agree: Agree = bool, options: PathOptions = ANY_PATH
) -> ScoringPath:
    """The fastest path that agrees with `model(...).logits` on seeded rows.

    Ranks that share a model try the same paths, and a path has to agree on all of them.
    """
    trees = probe_trees(causal_model(model).config)
    expected = [_own_logps(model, tree) for tree in trees]
    difference = partial(_difference, model, trees, expected)
    allowed = TOLERANCE[causal_model(model).dtype]
    found, refused = fastest(model, PATHS, difference, allowed, options, agree)
    return found or announced(model, DEFINITION, refused)


def fastest(
    model: nn.Module,
    paths: Sequence[ScoringPath],
    difference: Measure,
    allowed: float,
    options: PathOptions,
    agree: Agree,
) -> tuple[ScoringPath | None, list[str]]:
    """The first of these paths that agrees, and the reasons against those before it."""
    refused: list[str] = []
    for path in paths_for(paths, model):
        if options.compile and path.layout == "packed":
            continue  # a compiler would have to know the lengths in each batch
        barred = options.no_flex if path.layout == "flex" else ""
        found = ValueError(barred) if barred else difference(path)
        if agree(isinstance(found, float) and found <= allowed):
            assert isinstance(found, float), "it holds here too"
            return announced(model, replace(path, worst_difference=found), refused), refused
        refused.append(f"{path}: {reason(found)}")
    return None, refused


def paths_for(paths: Sequence[ScoringPath], model: nn.Module) -> list[ScoringPath]:
    """The paths worth trying: many small products pay on a CPU only, FlexAttention on a GPU."""
    inner, on_cpu = causal_model(model), input_device(model).type == "cpu"
    # The mask of FlexAttention holds tables, which would not follow it to another device.
    on_one_gpu = input_device(model).type == "cuda" and len(set(gpus_of(inner))) < 2
    tried = {"flex": on_one_gpu, "packed": on_cpu and own_attention(inner) == "sdpa"}
    return [path for path in paths if tried.get(path.layout, True)]


def _own_logps(model: nn.Module, tree: Tree) -> Tensor:
    """The definition: log-probs of one branch at a time, without padding."""
    parts = [
        tree_logps(model, [Tree(tree.prompt, (branch,))], DEFINITION) for branch in tree.branches
    ]
    return torch.cat(parts)


def _difference(
    model: nn.Module, trees: list[Tree], expected: list[Tensor], path: ScoringPath
) -> float | Exception:
    """The largest difference of a branch from the definition, or the error of the path."""
    if path.head == "fused" and output_head(causal_model(model)) is None:
        return ValueError("the head is not a plain projection")
    try:
        measured = tree_logps(model, trees, path)
    except Exception as error:  # model code refuses a mask in any way it likes
        return error
    lengths = [len(branch) for tree in trees for branch in tree.branches]
    gaps = torch.split(measured - torch.cat(expected), lengths)
    if causal_model(model).dtype == torch.float32:
        return max(abs(float(gap.double().sum())) for gap in gaps)
    return max(float(gap.abs().mean()) for gap in gaps)


def announced(model: nn.Module, path: ScoringPath, refused: list[str]) -> ScoringPath:
    """Logs why faster paths are not used, and returns the path."""
    # On a CPU, trees with a dense mask are the ordinary case; only some models allow packing.
    on_gpu = input_device(model).type == "cuda"
    is_fast = path.layout != "plain" and path.head != "exact" and not on_gpu
    if refused:
        logger.log(
            logging.INFO if is_fast else logging.WARNING,
            "Scoring by %s, which is slower. What is refused: %s.",
            path,
            "; ".join(refused),
        )
    return path


@contextmanager
def naming_the_way_out() -> Iterator[None]:
    """Raises an error of torch's compiler, which other rows than the probe's may meet, in words."""
    try:
        yield
    except RuntimeError as error:
        is_of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if is_out_of_memory(error) or not is_of_compiler:
            raise
        raise UsageError(
            f"torch's compiler failed ({reason(error)}). Start again with --set "
            "model.compile=false; where FlexAttention fails, with --set model.attention=sdpa."
        ) from error


def reason(difference: float | Exception) -> str:
    """The reason that a path is not used, in a few words."""
    difference = getattr(difference, "inner_exception", difference)  # of a compiler's own
    if isinstance(difference, float):
        return f"off by {difference:.2g}"
    return str(difference).split("\n", maxsplit=1)[0] or type(difference).__name__
