"""Writes down what an evaluation says of single completions; ranks put it together at its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

from ...schemas.batches import Judged
from ...schemas.rows import Role
from ..engine.distributed import gathered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ...schemas.batches import MicroBatch, StepBatch, World
    from ...schemas.methods import Branches
    from ..methods.recipe import Recipe


@dataclass(frozen=True)
class _Seen:
    batch: int
    place: int  # of the branch in its batch, over all ranks
    row_place: int  # of its row's first branch
    judged: Judged  # its row is not counted yet


class Witness:
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

    def see(self, micro: MicroBatch, branches: Branches, recipe: Recipe) -> None:
        """What the policy says of one of its micro-batches."""
        if self._rows < self._most_rows:
            self._seen += self._of(micro, branches, recipe.rewards(branches))

    def told(self, world: World) -> tuple[Judged, ...]:
        """What all ranks have seen, in the order of the evaluation; they call it together."""
        every = [one for part in gathered(world, self._seen) for one in part]
        every.sort(key=lambda one: (one.batch, one.place))
        rows: dict[tuple[int, int], int] = {}
        numbered = [
            replace(one.judged, row=rows.setdefault((one.batch, one.row_place), len(rows)))
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
                judged = Judged(
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
                yield _Seen(self._batch, *places, judged)
                place += 1
