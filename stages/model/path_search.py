"""Chooses the fastest attention layout and head that reproduce a model's own log-probs.

A probe runs the model on seeded rows, one completion at a time. The fused head is compared with the
model's own logits for the same hidden states. A layout is compared with single rows by the same
head. Half precision rounds the model's own logits (bfloat16 steps by 1/16 at logits of 8 to 16),
but a layout only changes the order of sums.

Measured in bfloat16, in mean nats per token, over all test families with weights drawn with 0.02
to 0.3: a correct head is off by at most 0.013 in a completion, a correct layout by at most 0.028
in a tree (where a router chose another expert), and by 0.057 in a trained model of 30 layers. A
layout without the sliding window is off by at least 0.24 for weights drawn with 0.1 or more. The
tolerance, about three times the first two, lies between.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .fused_head import output_head
from .library_errors import is_out_of_memory
from .logprobs import (
    ScoringPath,
    branch_logps,
    causal_model,
    gpus_of,
    head_rows,
    input_device,
    last_states,
    own_attention,
    tree_logps,
    tree_scores,
)
from .mixer_rows import mixers_of
from .prompt_once import require_carried_states
from .transformers_compat import is_reward_model, missing_kernels
from .tree_attention import single_branches

logger = logging.getLogger("align")

# Fastest first; they are compared with BASELINE.
PATHS = (
    ScoringPath("flex", "fused"),
    ScoringPath("packed", "fused"),
    ScoringPath("tree", "fused"),
    ScoringPath("once", "fused"),
    ScoringPath("plain", "fused"),
    ScoringPath("tree", "exact"),
)
BASELINE = ScoringPath("plain", "exact")
OF_SCORES = tuple(
    replace(path, head="score") for path in PATHS if path.head == "fused" and path.layout != "once"
)
# float32: nats per completion. Half precision: mean nats per token of a tree.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
DRAWS = 3  # of the rows before a completion

LONGEST_WINDOW = 512  # longer windows would make the probe itself expensive
# The tokens of each tree's prompt and completions.
PROBE_SHAPES = ((7, (5, 3, 9)), (1, (1, 4)), (12, (6, 1)), (3, (8,)))

Agree: TypeAlias = Callable[[bool], bool]  # whether a value is true on every rank
# The paths to try, the difference of each, and the tolerance.
Measured: TypeAlias = tuple[Sequence[ScoringPath], Callable[[ScoringPath], float], float]


def choose_path(
    model: nn.Module, agree: Agree = bool, no_flex: str = "", *, learns: bool = True
) -> ScoringPath:
    """The fastest path that agrees with the model's own numbers on seeded rows.

    Ranks that share a model try the same paths, and a path must agree on all of them. The log
    gives the reasons against faster paths; `no_flex` is one against FlexAttention. A model that
    learns runs no prompt apart.
    """
    inner: Any = causal_model(model)
    trees = probe_trees(inner.config)
    is_on_cpu = input_device(model).type != "cuda"
    if missing := missing_kernels(inner):
        logger.log(
            logging.INFO if is_on_cpu else logging.WARNING,
            "torch's own code runs the model's recurrent layers. Install %s for faster kernels on "
            "a GPU.",
            " and ".join(missing),
        )
    scores = is_reward_model(inner)
    refused: list[str] = []
    found = _scores_of(model, trees) if scores else _logps_of(model, trees, agree, refused)
    paths, difference, allowed = found
    for path in paths_for(paths, model, learns=learns):
        off = math.inf
        why = no_flex if path.layout == "flex" else ""
        if not why:
            try:
                off = difference(path)
            except Exception as error:  # model code raises any type for a mask
                why = _reason(error)
        why = why or f"off by {off:.2g}"
        if agree(off <= allowed):
            if path.layout in {"once", "plain"} or not _is_leaking(model, trees, path, agree):
                break
            why = "a completion depends on other rows"
        refused.append(f"{path}: {why}")
    else:
        if scores:
            raise UsageError(
                f"{type(inner).__name__} does not compute scores from its last hidden states "
                f"({'; '.join(refused)}). Use another model for rewards."
            )
        path = BASELINE
    if refused:
        # On a CPU, trees with a dense mask are normal; only some models allow packing.
        is_fast = path.layout != "plain" and path.head != "exact" and is_on_cpu
        logger.log(
            logging.INFO if is_fast else logging.WARNING,
            "Scoring by %s, which is slower. Rejected: %s.",
            path,
            "; ".join(refused),
        )
    return path


def _logps_of(
    model: nn.Module, trees: Sequence[Tree], agree: Agree, refused: list[str]
) -> Measured:
    """Paths of a causal model, compared with its own logits; without a wrong fused head."""
    exact, fused = _own_logps(model, trees)
    dtype = causal_model(model).dtype
    off = math.inf if isinstance(fused, str) else _difference(fused, exact, trees, dtype)
    expected = {"exact": exact}
    if agree(off <= TOLERANCE[dtype]):
        assert isinstance(fused, Tensor), "all ranks have a fused head, so this one does"
        expected["fused"] = fused
    else:
        why = fused if isinstance(fused, str) else f"off by {off:.2g}"
        refused.append(f"the fused head: {why}")

    def difference(path: ScoringPath) -> float:
        if path.layout == "once":
            require_carried_states(causal_model(model).get_decoder(), trees, input_device(model))
        return _difference(tree_logps(model, trees, path), expected[path.head], trees, dtype)

    return [path for path in PATHS if path.head in expected], difference, TOLERANCE[dtype]


def _is_leaking(model: nn.Module, trees: Sequence[Tree], path: ScoringPath, agree: Agree) -> bool:
    """Whether a completion's hidden states depend on the rows before it.

    Half precision has a tolerance that hides most leaks, so that no bit may differ when these rows
    are drawn anew. A mixture multiplies all tokens of an expert together, and their number changes
    the order of sums: its states may differ as those of plain rows do, which cannot leak.
    """
    changes = _changes(model, trees, path)
    if agree(min(changes) == 0):
        return False
    rounding = 10 * max(_changes(model, trees, replace(path, layout="plain")))
    return not agree(min(changes) <= rounding)


def _changes(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> list[float]:
    """Mean differences between the states of one completion behind several draws of other rows."""
    *others, last = trees[len(PROBE_SHAPES) - 1 :: -1]
    known, random = np.concatenate([tree.prompt for tree in trees]), np.random.default_rng(0)

    def drawn(row: NDArray[np.int32]) -> NDArray[np.int32]:
        return random.choice(known, len(row))

    found = []
    for _ in range(DRAWS):
        rows = [Tree(drawn(tree.prompt), tuple(map(drawn, tree.branches))) for tree in others]
        rows.append(Tree(last.prompt, (*map(drawn, last.branches[:-1]), last.branches[-1])))
        batch = path.batch(path.rows(rows), input_device(model))
        states = last_states(causal_model(model), batch, path)
        start, fork, *_ = edges = batch.edges[-1]
        found.append(torch.cat([states[start:fork], states[edges[-2] : edges[-1]]]).float())
    return [float((one - other).abs().mean()) for one, other in combinations(found, 2)]


def _scores_of(model: nn.Module, trees: Sequence[Tree]) -> Measured:
    """Layouts of a reward model, compared with transformers' scores of single rows."""
    inner: Any = causal_model(model)
    expected = torch.cat([_own_score(inner, tree) for tree in single_branches(trees)])

    def difference(path: ScoringPath) -> float:
        return float((tree_scores(model, trees, path) - expected).abs().max())

    return OF_SCORES, difference, TOLERANCE[inner.dtype] * max(1.0, float(expected.abs().max()))


def _own_score(model: Any, tree: Tree) -> Tensor:
    """The reference: the score that transformers computes for a row of one branch."""
    tokens = np.concatenate([tree.prompt, *tree.branches]).astype(np.int64)
    token_ids = torch.from_numpy(tokens)[None].to(input_device(model))
    scores: Tensor = model(input_ids=token_ids).logits[:, 0]
    return scores.float()


def paths_for(paths: Sequence[ScoringPath], model: nn.Module, *, learns: bool) -> list[ScoringPath]:
    """The paths worth trying: packing only on a CPU, FlexAttention only on one GPU."""
    inner, on_cpu = causal_model(model), input_device(model).type == "cpu"
    # The mask of FlexAttention holds tables, which would not follow it to another device.
    on_one_gpu = input_device(model).type == "cuda" and len(set(gpus_of(inner))) < 2
    has_mixers = bool(mixers_of(inner))
    tried = {
        "flex": on_one_gpu,
        "packed": on_cpu and own_attention(inner) == "sdpa",
        "once": not learns,
    }
    found = [path for path in paths if tried.get(path.layout, True)]
    # In trees, the rows of mixers repeat the prompt.
    return sorted(found, key=lambda path: has_mixers and path.layout != "once")


def _own_logps(model: nn.Module, trees: Sequence[Tree]) -> tuple[Tensor, Tensor | str]:
    """Log-probs of one completion at a time, without padding.

    First by the model's own logits, then by the fused head, or the reason that there is none.
    """
    inner, device = causal_model(model), input_device(model)
    states: list[Tensor] = []
    rows = [BASELINE.batch([row], device) for row in single_branches(trees)]
    if output_head(inner) is None:
        exact = [branch_logps(model, row, BASELINE) for row in rows]
        return torch.cat(exact), "the head is not a plain projection"
    layer = inner.get_output_embeddings()
    with layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])):
        exact = [branch_logps(model, row, BASELINE) for row in rows]
    if len(states) != len(rows):
        return torch.cat(exact), "the model does not call its head"
    fused = []
    for row, hidden, own in zip(rows, states, exact, strict=True):
        # With a device_map, hidden states and token ids may be on different devices.
        predictors = hidden.flatten(0, 1)[row.predictors.to(hidden.device)]
        logps = head_rows(inner, predictors, row.targets, collision_logps=False)[0]
        fused.append(logps.to(own.device))
    return torch.cat(exact), torch.cat(fused)


def _difference(
    found: Tensor, expected: Tensor, trees: Sequence[Tree], dtype: torch.dtype
) -> float:
    """The largest difference, in the unit of the dtype's tolerance."""
    sizes = [[len(branch) for branch in tree.branches] for tree in trees]
    if dtype == torch.float32:
        gaps = torch.split(found - expected, [size for tree in sizes for size in tree])
        return max(abs(float(gap.double().sum())) for gap in gaps)
    # A mean, because a single token's difference may be rounding.
    gaps = torch.split(found - expected, [sum(tree) for tree in sizes])
    return max(float(gap.abs().mean()) for gap in gaps)


@contextmanager
def explaining_compile_errors() -> Iterator[None]:
    """Raises an error of torch's compiler as a UsageError with the setting to change."""
    try:
        yield
    except RuntimeError as error:
        is_of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if is_out_of_memory(error) or not is_of_compiler:
            raise
        raise UsageError(
            f"torch's compiler failed ({_reason(error)}). Start again with --set "
            "model.attention=sdpa, which does without FlexAttention."
        ) from error


def _reason(error: Exception) -> str:
    """The first line of an error."""
    error = getattr(error, "inner_exception", error)  # torch wraps a compiler's error
    return str(error).split("\n", maxsplit=1)[0] or type(error).__name__


def probe_trees(config: Any) -> list[Tree]:
    """Seeded rows of uneven lengths, some longer than the model's window."""
    text = config.get_text_config(decoder=True)
    shapes = list(PROBE_SHAPES)
    windows = [getattr(text, name, None) for name in ("sliding_window", "window_size")]
    window = next((window for window in windows if isinstance(window, int)), 0)
    if 0 < window <= LONGEST_WINDOW:
        shapes += [(window + 5, (4, 7)), (max(1, window // 2), (window + 3, 2))]
    elif window:
        logger.info("The model's attention window of %d tokens is longer than the probe.", window)
    # Without the tokens that the config gives a meaning: padding, images, ...
    named = chain(vars(config).items(), vars(text).items())
    special = [value for name, value in named if name.endswith(("_token_id", "_token_index"))]
    special = [value for value in special if isinstance(value, int)]
    tokens = np.setdiff1d(np.arange(text.vocab_size, dtype=np.int32), special)
    random = np.random.default_rng(0)
    return [
        Tree(random.choice(tokens, prompt), tuple(random.choice(tokens, size) for size in sizes))
        for prompt, sizes in shapes
    ]
