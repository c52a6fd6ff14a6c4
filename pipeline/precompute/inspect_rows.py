"""The output of `align inspect`: a cache's summary, a row of it, or its rejected rows."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ...schemas.data_options import TokenOptions
from ...schemas.errors import CorruptionError, UsageError, counted
from ...schemas.json_codec import to_json
from ...schemas.rows import Role
from ...stages.data.preview import lines_of
from ...stages.data.tokenizer import load_tokenizer
from ...stages.report.cache_rows import find_row, rejected_rows
from ...stages.report.cache_summary import render, summarize
from ...stages.storage.cache import Cache
from ..jobs.object_inputs import local_model


def lines_of_inspection(
    cache: Cache, *, row: str | None, rejected: bool, as_json: bool, model: str | None
) -> Iterator[str | Text]:
    """The summary of a cache, one of its rows, or its rejected rows."""
    if sum((row is not None, rejected, as_json)) > 1:
        raise UsageError("--row, --rejected and --json show different things: choose one.")
    manifest = cache.manifest()
    if row is not None:
        yield from lines_of_row(cache, row, model=model)
    elif rejected:
        total = sum(manifest.reasons.values())
        yield f"{total:,} of {manifest.rows_in:,} rows are rejected"
        yield from rejected_rows(cache, manifest)
    else:
        summary = summarize(cache)
        yield to_json(summary).rstrip() if as_json else render(summary)


def lines_of_row(cache: Cache, query: str, *, model: str | None) -> Iterator[str | Text]:
    """A row as the model reads it with the reference's log-probs, or the reason of its rejection.

    `model` is a folder with the tokenizer, if the reference's own is missing.
    """
    manifest = cache.manifest()
    rows = find_row(cache, manifest, query)
    if isinstance(rows, str):
        yield rows
        return
    stored = manifest.fingerprint
    options = TokenOptions(bos=stored["tokens.bos"], eos=stored["tokens.eos"])  # type: ignore[arg-type]
    tokenizer = load_tokenizer(local_model(model or manifest.model, weights=False), options)
    names = {entry.identity: entry.name for entry in manifest.inputs}
    file = int(rows.file[0])
    if file not in names:
        raise CorruptionError(
            f"{cache.manifest_file} is damaged: it does not name the data file {file:016x} of row "
            f"{rows.ids()[0]}. Restore it from a copy, or make the cache again."
        )
    yield f"row id {rows.ids()[0]}"
    yield from lines_of(rows, tokenizer, file=names[file], prompt_side=stored["tokens.prompt_side"])
    if not manifest.is_scored:
        yield "  the cache is not scored: it has no log-probs"
        return
    yield "  the reference's log-probs, summed over learned tokens:"
    counts = rows.num_learned.tolist()
    for role, logp, count in zip(rows.roles.tolist(), rows.logps.tolist(), counts, strict=True):
        name = Role(role).name.lower()
        yield f"    {name}: {logp:.4f} of {counted(count, 'tokens')}, {logp / count:.4f} each"
