"""What may go wrong without ending a run."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..schemas.errors import AlignError

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("align")


@contextmanager
def borne(missing: str) -> Iterator[None]:
    """A file that only a person looks at: where it cannot be made, that is told."""
    try:
        yield
    except AlignError as error:
        logger.warning("%s: %s", missing, error)
