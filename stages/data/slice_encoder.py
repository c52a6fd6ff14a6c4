"""The encoder of slices of the data, which parses, checks, tokenizes and hashes rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...schemas.data_options import TokenOptions
from ...schemas.errors import FingerprintError
from ...schemas.row_keys import EncodedChunk, InputCounts, KeyedRows, key_rows
from ...schemas.rows import Record, Rejected
from .encode import Encoder
from .files import InputFile, Slice
from .records import in_batches, records_in
from .shapes import Shape
from .tokenizer import collector_paused, load_tokenizer, tokenizer_fingerprint


@dataclass(frozen=True)
class EncodingJob:
    """The inputs of a process that encodes slices."""

    model: str
    options: TokenOptions
    shape: Shape
    files: tuple[int, ...]  # the identity of each input
    tokenizer: Mapping[str, str]  # its fingerprint, which every process has to reproduce


class SliceEncoder:
    """The encoder of a process, whose tokenizer is loaded once."""

    def __init__(self, job: EncodingJob) -> None:
        self._job = job
        tokenizer = load_tokenizer(job.model, job.options)
        self._is_same = tokenizer_fingerprint(tokenizer) == job.tokenizer
        self._encoder = Encoder(tokenizer, job.options)

    def rows(
        self, inputs: Sequence[InputFile], part: Slice, counts: InputCounts
    ) -> Iterator[KeyedRows]:
        """The usable rows of a slice, numbered from its first row."""
        if not self._is_same:
            raise FingerprintError(
                f"{self._job.model}: the tokenizer or its template changed after this run began. "
                "Run the same command again."
            )
        job, file = self._job, inputs[part.file]
        found = records_in(file, job.shape, job.files[part.file], part.part)
        for batch in in_batches(found):
            with collector_paused():
                records = [one for one in batch if isinstance(one, Record)]
                encoded = self._encoder.encode(records)
                keyed = key_rows(encoded.rows, carried=job.shape.carried)
            rejected = [*(one for one in batch if isinstance(one, Rejected)), *encoded.rejected]
            counts.count(EncodedChunk(part.file, keyed, rejected, dict(encoded.notes)))
            yield keyed
