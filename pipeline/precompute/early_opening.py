"""Loads the reference in a thread while this process prepares rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from ...schemas.rows import Reference, Scorer
from .scoring_worker import one_thread


@contextmanager
def opened_meanwhile(reference: Reference) -> Iterator[Reference]:
    """The reference, which is being opened from now on; whoever opens it has the error, if any."""
    with one_thread("align-load") as loader:
        yield _Opening(reference, loader.submit(_on_same_gpu(reference.open)))


@dataclass(frozen=True)
class _Opening:
    reference: Reference
    scorer: Future[Scorer]

    def identity(self) -> Mapping[str, str]:
        return self.reference.identity()

    def hidden_size(self) -> int:
        return self.reference.hidden_size()

    def vocabulary(self) -> int:
        return self.reference.vocabulary()

    def open(self) -> Scorer:
        return self.scorer.result()


def _on_same_gpu(open_scorer: Callable[[], Scorer]) -> Callable[[], Scorer]:
    """A new thread begins on the first GPU, whichever this one has chosen."""
    # Here, because only a reference that computes by torch needs it imported.
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return open_scorer
    device = torch.cuda.current_device()

    def opened() -> Scorer:
        torch.cuda.set_device(device)
        return open_scorer()

    return opened
