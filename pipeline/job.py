"""One run of stage 1 before its first row: data, tokenizer, reference, and what they amount to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.cache import file_identity
from ..schemas.json_codec import digest
from ..stages.data.data_schema import Shape, common_shape
from ..stages.data.decode_rows import parse_chunk
from ..stages.data.input_files import Digested, InputFile, digested, iter_chunks, open_inputs
from ..stages.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_fingerprint
from ..stages.storage.cache_folder import CacheFolder, WorkFolder
from ..stages.storage.manifest_file import load_manifest
from .identity import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schemas.config import Config
    from ..schemas.rows import Reference


@dataclass(frozen=True)
class Job:
    """Everything that is known before the first row is encoded."""

    config: Config
    reference: Reference
    folder: CacheFolder
    inputs: tuple[InputFile, ...]  # in the order of their digests, however they were named
    digested: tuple[Digested, ...]  # the inputs, before anything else was read from them
    shape: Shape
    tokenizer: TextTokenizer
    fingerprint: dict[str, str]
    plan_key: str
    reference_key: str

    @property
    def files(self) -> tuple[int, ...]:
        """The identity of each input."""
        return tuple(file_identity(file.sha256) for file in self.digested)

    @property
    def paths(self) -> dict[int, Path]:
        """Where a data file lies, by its identity; of files with equal bytes the last."""
        return {identity: file.path for identity, file in zip(self.files, self.inputs, strict=True)}

    @property
    def work(self) -> WorkFolder:
        """Where this job keeps what is not finished."""
        return self.folder.work(self.plan_key)

    @property
    def is_published(self) -> bool:
        """Whether the folder holds the finished cache this job is to make."""
        path = self.folder.manifest
        if not path.exists():
            return False
        found = path.stat()
        return _published_plan(self.folder, (found.st_ino, found.st_mtime_ns)) == self.plan_key


def open_job(config: Config, reference: Reference) -> Job:
    """Looks at the data, the tokenizer and the reference; changes nothing."""
    inputs, before = _in_order(open_inputs(config.data.files))
    shape = common_shape(inputs, renames(config.data.map), config.data.carry)
    tokenizer = load_tokenizer(config.model.path, config.tokens)
    if _first_is_conversation(inputs, shape):
        tokenizer.require_template(config.model.path)
    identity = dict(reference.identity())
    fields = fingerprint(
        config,
        files=digest([file.sha256 for file in before]),
        shape=digest({"kind": shape.kind, "source": shape.source, "carried": shape.carried}),
        tokenizer=tokenizer_fingerprint(tokenizer),
        model=identity,
    )
    return Job(
        config=config,
        reference=reference,
        folder=CacheFolder(Path(config.cache.output)),
        inputs=inputs,
        digested=before,
        shape=shape,
        tokenizer=tokenizer,
        fingerprint=fields,
        plan_key=digest(fields),
        reference_key=digest(identity),
    )


@lru_cache(maxsize=1)
def _published_plan(folder: CacheFolder, version: tuple[int, int]) -> str:
    """The plan key in a manifest, which is read again only when another file stands there."""
    return load_manifest(folder).plan_key


def _in_order(
    inputs: tuple[InputFile, ...],
) -> tuple[tuple[InputFile, ...], tuple[Digested, ...]]:
    """The files by their digests, of equal ones by their names: so their order decides nothing."""
    found = [(digested(file), file) for file in inputs]
    found.sort(key=lambda each: (each[0].sha256, each[1].path.name))
    return tuple(file for _, file in found), tuple(before for before, _ in found)


def renames(columns: Mapping[str, str]) -> dict[str, str]:
    """Their column: ours. A column of ours mapped to nothing is theirs under no name we know."""
    return {
        theirs or ours: ours if theirs else f"unused {ours}" for ours, theirs in columns.items()
    }


def _first_is_conversation(inputs: tuple[InputFile, ...], shape: Shape) -> bool:
    """Whether the first usable record is made of messages."""
    for chunk in iter_chunks(inputs, shape.columns, rows_per_chunk=16):
        records, _ = parse_chunk(chunk, shape)
        if records:
            return records[0].is_conversation
    return False
