"""Writes down what an evaluation says of single held-out completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schemas.cache import Stops
from ..stages.data.tokenizer import decoder
from ..stages.report.eval_table import evaluation_csv
from ..stages.storage import fs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..schemas.batches import Judged
    from ..stages.report.eval_table import Decode, Kind
    from ..stages.storage.run_folder import RunFolder
    from .session import Session


class EvaluationTables:
    """The files of one run; a tokenizer is loaded for the first that is to hold text."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session = session
        self._folder = folder
        self._decode: Decode | None = None

    def write(self, step: int, judged: Sequence[Judged]) -> Path:
        """One file, of one evaluation."""
        job = self._session.job
        if job.config.train.eval_text and not self._decode:
            self._decode = decoder(job.policy.path, Stops.of(job.manifest.fingerprint).tokens)
        path = self._folder.evaluation(step)
        fs.make_folder(path.parent)
        text = evaluation_csv(judged, self._kind, decode=self._decode)
        fs.publish(path, text.encode(), label="evaluation")
        return path

    @property
    def _kind(self) -> Kind:
        if self._session.recipe.head == "score":
            return "scores"
        return "log-probs" if self._session.job.reading.context else "log-ratios"
