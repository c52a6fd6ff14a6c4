"""The numbers that two trees left: shard columns, metrics, weights and tables, by name."""

import json
import re
from collections import defaultdict

import polars as pl
import torch
from safetensors import safe_open

# (kind of file, name in the earlier tree): name here, or none for what went.
RENAMES: dict[tuple[str, str], str | None] = {}
MEASURED = re.compile(r"time$|speed/|memory/")  # seconds and MiB


def numbers_in(folder, *, renamed):
    """By "FILE: NAME" every column, line and tensor below a folder, as comparable values."""
    found = {}
    for name, table in _tables_in(folder).items():
        for column in table:
            called = column.name
            if renamed:
                called = RENAMES.get((name.suffix or "shards", column.name), column.name)
            if called:
                found[f"{name}: {called}"] = column.rename(called)
    for path in _files_in(folder, "metrics.jsonl"):
        for number, line in enumerate(path.read_text().splitlines()):
            found[f"{path.relative_to(folder)}: line {number}"] = _without_times(json.loads(line))
    for path in _files_in(folder, "*.safetensors"):
        with safe_open(path, "pt") as weights:
            for tensor in weights.keys():  # noqa: SIM118 (it is no mapping)
                found[f"{path.relative_to(folder)}: {tensor}"] = _bits(weights.get_tensor(tensor))
    return found


def _tables_in(folder):
    """By its path every table; the shards of a folder are one, so they may be cut otherwise."""
    parts = defaultdict(list)
    for path in _files_in(folder, "*.parquet"):
        name = path.relative_to(folder)
        parts[name.parent if name.stem.startswith("part-") else name].append(pl.read_parquet(path))
    for path in _files_in(folder, "*.csv"):
        parts[path.relative_to(folder)].append(pl.read_csv(path, infer_schema=False))
    return {name: pl.concat(tables) for name, tables in parts.items()}


def _files_in(folder, pattern):
    """Files that hold results: none of stores, records and half-done work."""
    found = (path for path in sorted(folder.rglob(pattern)) if path.is_file())
    return [path for path in found if not {"_align", "home", "mlruns"} & set(path.parts)]


def is_same(one, other):
    """Whether two values are the same bits; NaN is equal to itself."""
    if isinstance(one, pl.Series) and isinstance(other, pl.Series):
        return one.dtype == other.dtype and one.equals(other)
    return type(one) is type(other) and one == other


def _without_times(value):
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not MEASURED.match(k)}
    return repr(value)


def _bits(tensor):
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )
