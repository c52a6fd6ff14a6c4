"""The encoder of slices of the data, which parses, checks, tokenizes and hashes rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...schemas.data_options import TokenOptions
from ...schemas.errors import FingerprintError
from ...schemas.row_keys import EncodedChunk, InputCounts, KeyedRows, key_rows
from .data_shape import Shape
from .decode_rows import parse_chunk
from .encode import Encoder
from .free_text import Watch
from .input_files import Chunk, InputFile, Slice, iter_slice
from .tokenizer import collector_paused, load_tokenizer, tokenizer_fingerprint
from .unread_columns import counts_of


@dataclass(frozen=True)
class EncodingJob:
    """The inputs of a process that encodes slices."""

    model: str
    options: TokenOptions
    shape: Shape
    seed: int
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
        """The usable rows of a slice, numbered from the first row of its file range."""
        if not self._is_same:
            raise FingerprintError(
                f"{self._job.model}: the tokenizer or its template changed after this run began. "
                "Run the same command again."
            )
        unwatched = self._job.shape.unwatched
        watch = None if unwatched is None else Watch(unwatched)
        for chunk, is_own in iter_slice(inputs, part, self._job.shape.columns):
            counts.rows_passed += len(chunk)
            if is_own:
                encoded = self._encode(chunk, watch)
                counts.count(encoded)
                yield encoded.keyed
        if watch:
            counts.notes.update(counts_of(watch))

    def _encode(self, chunk: Chunk, watch: Watch | None) -> EncodedChunk:
        named = replace(chunk, file=self._job.files[chunk.file])
        with collector_paused():
            records, rejected = parse_chunk(named, self._job.shape, watch)
            encoded = self._encoder.encode(records)
            keyed = key_rows(encoded.rows, seed=self._job.seed, carried=self._job.shape.carried)
        refused = [*rejected, *encoded.rejected]
        return EncodedChunk(chunk.file, keyed, refused, dict(encoded.notes))
