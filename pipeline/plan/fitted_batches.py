"""Token budget of a rank: as planned, or as memory has turned out to allow."""

from __future__ import annotations

from collections.abc import Iterator

from ...schemas.checkpoint import FittedBatches
from ...schemas.train_options import TrainOptions
from ...stages.storage.bucket.objects import Location
from ...stages.storage.run.run_folder import RunFolder
from ...stages.storage.signed_records import SignedRecords

# A GPU, or the like, wants large products. On a CPU more at once are no faster and take memory.
_ON_GPU, _ON_CPU = 16_384, 2048


def planned_tokens(train: TrainOptions, device: str) -> int:
    """The micro-batch that is asked for, in tokens."""
    return train.tokens_per_batch or (_ON_CPU if device == "cpu" else _ON_GPU)


def fitting_tokens(folder: RunFolder, planned: int) -> int:
    """The micro-batch of a run, smaller where memory ran out with the planned one."""
    known = _FITTED.find(folder.fitted)
    # Whoever asks for another size wants to know anew.
    return known.fits if known and known.planned == planned else planned


def note_fitting(folder: RunFolder, planned: int, fits: int) -> None:
    """Notes for the next start that memory ran out, and the token budget to use instead."""
    _FITTED.replace(folder.fitted, FittedBatches(planned, fits))


def _faults(fitted: FittedBatches, path: Location) -> Iterator[str]:
    if not 0 < fitted.fits <= fitted.planned:
        yield f"{fitted.fits} of {fitted.planned} tokens cannot be what fits"


_FITTED = SignedRecords(FittedBatches, label="fitted", remedy="Remove it.", faults=_faults)
