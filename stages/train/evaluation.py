"""An evaluation is one step: what a loss asks of a whole step it asks of all held-out rows.

Before the first step the policy is held to the log-probs that the cache was made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ...schemas.batches import Engine, EvalSample, MicroBatch, StepBatch, StepSize, World
from ...schemas.errors import FingerprintError
from ...schemas.methods import Branches, Step
from ...schemas.rows import Role, ScoredBlock, Tree, allowed_gaps
from ..engine.distributed import gathered
from ..methods.recipe import MethodState, Recipe
from ..storage.failpoints import reach
from .step import Sums, branches_of, reported, step_of


def asks_first(recipe: Recipe) -> bool:
    """Whether the policy has to see all held-out rows once before any of their losses."""
    return recipe.surveys or "mismatched" in recipe.needs


@torch.no_grad()
def whole_step(
    engine: Engine, recipe: Recipe, batches: Iterable[StepBatch], size: StepSize
) -> Step:
    """What all held-out rows have in common, a float64 or a few for each branch of theirs."""
    steps = []
    for batch in batches:
        reach("evaluation.batch")
        steps.append(step_of(engine, recipe, batch))
    names = steps[0].surveyed if steps else ()
    return Step(
        rows=size.rows,
        branches=size.branches,
        tokens=size.tokens,
        chosen_tokens=size.chosen_tokens,
        mismatched=_joined([step.mismatched for step in steps]),
        surveyed={name: _joined([step.surveyed[name] for step in steps]) for name in names},
    )


@torch.no_grad()
def evaluate(
    engine: Engine,
    recipe: Recipe,
    batches: Iterable[StepBatch],
    *,
    step: Step,
    state: MethodState,
    samples: EvalSamples,
) -> dict[str, float]:
    """Means over all items of all batches, nothing learned."""
    sums, place = Sums(), 0
    for batch in batches:
        reach("evaluation.batch")
        samples.begin(batch)
        engine.learn_mode(dropout_seed=None)
        for micro in batch.own:
            branches = branches_of(engine, recipe, micro)
            samples.add(micro, branches, recipe)
            assert branches.places is not None, "a micro-batch knows where its branches stand"
            here = replace(branches, places=branches.places + place)
            sums.add_outcome(recipe.outcome(here, step, state))
        place += batch.branches
    return reported(recipe, sums.totals(engine))


def _joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class _Seen:
    batch: int
    place: int  # of the branch in its batch, over all ranks
    row_place: int  # of its row's first branch
    sample: EvalSample  # its row is not counted yet


class EvalSamples:
    """Sees the first rows of an evaluation; which ones hangs on no rank and no micro-batch."""

    def __init__(self, *, most_rows: int, keeps_ids: bool) -> None:
        self._most_rows = most_rows
        self._keeps_ids = keeps_ids
        self._batch = -1
        self._rows = 0  # of the batches before this one
        self._next_rows = 0
        self._seen: list[_Seen] = []

    def begin(self, batch: StepBatch) -> None:
        """The next batch of the evaluation."""
        self._batch += 1
        self._rows = self._next_rows
        self._next_rows += batch.rows

    def add(self, micro: MicroBatch, branches: Branches, recipe: Recipe) -> None:
        """What the policy says of one of its micro-batches."""
        if self._rows < self._most_rows:
            self._seen += self._of(micro, branches, recipe.rewards(branches))

    def gather(self, world: World) -> tuple[EvalSample, ...]:
        """What all ranks have seen, in the order of the evaluation; they call it together."""
        every = [one for part in gathered(world, self._seen) for one in part]
        every.sort(key=lambda one: (one.batch, one.place))
        rows: dict[tuple[int, int], int] = {}
        numbered = [
            replace(one.sample, row=rows.setdefault((one.batch, one.row_place), len(rows)))
            for one in every
        ]
        return tuple(one for one in numbered if one.row < self._most_rows)

    def _of(
        self, micro: MicroBatch, branches: Branches, compared: Tensor | None
    ) -> Iterator[_Seen]:
        logps = iter(branches.logps.detach().cpu().tolist())
        rewards = repeat(None) if compared is None else iter(compared.cpu().tolist())
        place = 0
        for row_id, tree in zip(micro.row_ids, micro.trees, strict=True):
            first = place
            prompt = tree.prompt.copy() if self._keeps_ids else None
            for completion in tree.branches:
                sample = EvalSample(
                    row=0,
                    row_id=row_id,
                    role=Role(int(micro.roles[place])),
                    num_tokens=len(completion),
                    logp=next(logps),
                    reference_logp=float(micro.reference[place]),
                    reward=next(rewards),
                    prompt=prompt,
                    completion=completion.copy() if self._keeps_ids else None,
                )
                places = int(micro.places[place]), int(micro.places[first])
                yield _Seen(self._batch, *places, sample)
                place += 1


def largest_gap(engine: Engine, sample: Iterable[tuple[str, ScoredBlock]], *dtypes: str) -> float:
    """Scores rows of a cache again; numbers other than the cache's are refused.

    Every rank scores the same rows: a policy spread over ranks needs all of them for each.
    """
    engine.learn_mode(dropout_seed=None)
    worst = 0.0
    for name, block in sample:
        logps, lengths = _scored(engine, block), block.rows.completions.lengths
        gaps = np.abs(logps - block.logps)
        excess = gaps - allowed_gaps(lengths, *dtypes)
        if not (excess <= 0).all():
            raise _refusal(name, block, logps, int(np.argmax(excess)))
        worst = max(worst, float(gaps.max()))
    return worst


@torch.no_grad()
def _scored(engine: Engine, block: ScoredBlock) -> np.ndarray:
    rows = block.rows
    sums = []
    for row in range(len(rows)):
        branches = range(rows.branch_offsets[row], rows.branch_offsets[row + 1])
        tree = Tree(rows.prompts[row], tuple(rows.completions[branch] for branch in branches))
        tokens = torch.split(engine.forward((tree,))["logps"], [len(one) for one in tree.branches])
        sums += [float(logps.double().sum()) for logps in tokens]
    return np.array(sums)


def _refusal(name: str, block: ScoredBlock, logps: np.ndarray, at: int) -> FingerprintError:
    row = block.rows.row[block.rows.row_of_branch[at]]
    return FingerprintError(
        f"{name}: the policy is the reference of this cache, yet it scores a branch of input row "
        f"{row} as {logps[at]:.6f}, and the cache has {block.logps[at]:.6f}. `align verify` tells "
        "whether the cache is sound. If it is, this machine computes otherwise than the one it "
        "was made on: make it anew here, or with --dtype float32."
    )
