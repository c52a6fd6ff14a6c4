"""What a rank says when another one is gone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import distributed

from ..schemas.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..schemas.batches import World


@contextmanager
def naming_lost_peers(world: World) -> Iterator[None]:
    """A collective that fails means that another rank has ended, and that one knows why."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not _is_of_a_collective(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise PeerError(
            f"Rank {world.rank} lost another rank ({first_line}). What that one said tells why. "
            "Start all ranks again with --resume auto."
        ) from error


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Gloo's errors have no type of their own."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)
