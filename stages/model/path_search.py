"""Chooses how a model is scored, for both stages.

A probe compares the fast layouts, heads and compiled layers with the model's own logits, and takes
the fastest that agrees.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat, starmap
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .compiled_layers import why_not_compiled
from .head.fused_head import output_head
from .layouts.flex_attention import why_no_flex
from .logprobs import (
    ScoringPath,
    causal_model,
    gpus_of,
    input_device,
    last_states,
    own_attention,
    tree_logps,
)
from .memory.live_memory import is_out_of_memory
from .probe_rows import probe_trees
from .transformers_compat import decoder_layers

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
# Relative, of all gradients of a layer: compiled layers round less often in half precision.
GRADIENTS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

Agree: TypeAlias = Callable[[bool], bool]  # whether what holds here holds on every rank
# The difference of a path from the model's own numbers, or the error of the path.
Measure: TypeAlias = Callable[[ScoringPath], float | Exception]


@dataclass(frozen=True)
class PathOptions:
    """What a model may be scored with."""

    no_flex: str = ""  # why FlexAttention may not be used, if it may not
    compile: Literal["auto", "on", "off"] = "off"  # the decoder layers; auto: on a GPU
    no_compile: str = ""  # why they may not be compiled, if they may not
    compiler: str = "inductor"  # torch's name of it

    @staticmethod
    def of(model: ModelOptions, config: Any = None, no_compile: str = "") -> PathOptions:
        """Those of the settings of a model; `config` is that of one that learns with dropout."""
        if model.compiling == "on" and no_compile:
            raise uncompilable(no_compile)
        return PathOptions(why_no_flex(model.attention, config), model.compiling, no_compile)


ANY_PATH = PathOptions()


def choose_path(
    model: nn.Module, agree: Agree = bool, options: PathOptions = ANY_PATH
) -> ScoringPath:
    """The fastest path that agrees with `model(...).logits` on seeded rows.

    Ranks that share a model try the same paths, and a path has to agree on all of them.
    """
    trees = probe_trees(causal_model(model).config)
    expected = [_own_logps(model, tree) for tree in trees]
    search = PathSearch(
        model,
        partial(_difference, model, trees, expected),
        trees,
        TOLERANCE[causal_model(model).dtype],
        options,
        agree,
    )
    if found := search.fastest(PATHS):
        return found
    return announced(model, search.require_compiled(DEFINITION), search.refused)


class PathSearch:
    """A search for the fastest path that agrees, and the reasons against those that do not."""

    def __init__(
        self,
        model: nn.Module,
        difference: Measure,
        trees: Sequence[Tree],
        allowed: float,
        options: PathOptions,
        agree: Agree,
    ) -> None:
        """`trees` are the rows of the probe, and `allowed` is the largest difference."""
        self._model, self._options, self._agree = model, options, agree
        self._difference, self._trees, self._allowed = difference, trees, allowed
        self.refused: list[str] = []

    def fastest(self, paths: Sequence[ScoringPath]) -> ScoringPath | None:
        """The first of these that agrees, with compiled layers where they agree too."""
        for path in paths_for(paths, self._model):
            if self._options.compile == "on" and path.layout == "packed":
                continue  # a compiler would have to know the lengths in each batch
            barred = self._options.no_flex if path.layout == "flex" else ""
            if found := self._agreed(path, barred, self._difference):
                return announced(self._model, self._with_compiled_layers(found), self.refused)
        return None

    def require_compiled(self, path: ScoringPath) -> ScoringPath:
        """The path, unless the setting asks for compiled layers and it has none."""
        if self._options.compile == "on" and not path.compiler:
            raise uncompilable("; ".join(self.refused))
        return path

    def _with_compiled_layers(self, path: ScoringPath) -> ScoringPath:
        asked = self._options.compile
        if asked == "off" or (asked == "auto" and input_device(self._model).type != "cuda"):
            return path
        barred = self._options.no_compile or why_not_compiled(causal_model(self._model))
        if path.head == "exact":
            barred = "its output head is not a plain projection"
        compiled = replace(path, compiler=self._options.compiler)
        return self.require_compiled(self._agreed(compiled, barred, self._as_learned) or path)

    def _agreed(self, path: ScoringPath, barred: str, measure: Measure) -> ScoringPath | None:
        difference = ValueError(barred) if barred else measure(path)
        if self._agree(isinstance(difference, float) and difference <= self._allowed):
            assert isinstance(difference, float), "it holds here too"
            return replace(path, worst_difference=difference)
        self.refused.append(f"{path}: {reason(difference)}")
        return None

    def _as_learned(self, path: ScoringPath) -> float | Exception:
        """The difference of a path with compiled layers, if their gradients agree as well."""
        difference = self._difference(path)
        if torch.is_inference_mode_enabled() or not isinstance(difference, float):
            return difference
        try:
            found, own = (self._gradients(one) for one in (path, replace(path, compiler="")))
            distances = [*starmap(_apart, zip(found, own, strict=True))]
        except Exception as error:  # the compiler fails in any way it likes
            return error
        allowed = GRADIENTS[causal_model(self._model).dtype]
        off = next((apart for apart in distances if not apart <= allowed), None)
        return difference if off is None else ValueError(f"its gradients are off by {off:.2g}")

    def _gradients(self, path: ScoringPath) -> list[list[Tensor | None]]:
        """The gradients of a layer of each kind, as far as it learns."""
        learning = _learning_layers(causal_model(self._model))
        if not learning:
            return []
        self._model.train()  # so that the graphs are those of the training
        try:
            with torch.enable_grad():
                total = self._weighted_states(path)
            found = iter(torch.autograd.grad(total, [*chain(*learning)], allow_unused=True))
        finally:
            self._model.eval()
        return [list(islice(found, len(weights))) for weights in learning]

    def _weighted_states(self, path: ScoringPath) -> Tensor:
        """A sum whose weights differ, because a norm's plain sum does not depend on its input."""
        batch = path.batch(path.rows(self._trees), input_device(self._model))
        states = last_states(causal_model(self._model), batch, path).float()
        return (states @ torch.arange(states.shape[1], device=states.device).sin()).sum()


def uncompilable(why: str) -> UsageError:
    """The error of `model.compile: on` where the layers cannot be compiled."""
    return UsageError(
        f"model.compile is on, and the decoder layers cannot be compiled here ({why}). "
        "Set it to auto or off."
    )


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
            f"torch's compiler failed ({reason(error)}). Start again with "
            "--set model.compile=off; where FlexAttention fails, with --set model.attention=sdpa."
        ) from error


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


def _learning_layers(model: Any) -> list[list[nn.Parameter]]:
    """The weights that learn in the first layer, and in one of each kind of the others.

    Kinds differ in their modules or in what they attend to. The input of the first may have no
    gradient, so it may have a graph of its own.
    """
    attention = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    found: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for layer, window in zip(decoder_layers(model), attention or repeat(""), strict=False):
        if weights := [one for one in layer.parameters() if one.requires_grad]:
            found.setdefault((not found, window, *map(type, layer.modules())), weights)
    return list(found.values())


def _apart(found: Sequence[Tensor | None], own: Sequence[Tensor | None]) -> float:
    """The distance of the gradients of a layer, as a share of their length."""
    if [one is None for one in found] != [one is None for one in own]:
        raise ValueError("its gradients are not those of the same weights")
    ours, theirs = ([one.float() for one in some if one is not None] for some in (found, own))
    gaps = [float((one - other).norm()) for one, other in zip(ours, theirs, strict=True)]
    length = math.hypot(*(float(one.norm()) for one in theirs))
    return math.hypot(*gaps) / max(length, torch.finfo(torch.float32).tiny)


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


def reason(difference: float | Exception) -> str:
    """The reason that a path is not used, in a few words."""
    difference = getattr(difference, "inner_exception", difference)  # of a compiler's own
    if isinstance(difference, float):
        return f"off by {difference:.2g}"
    return str(difference).split("\n", maxsplit=1)[0] or type(difference).__name__
