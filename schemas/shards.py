"""The Arrow schema of a shard: one row per prompt, lists over its branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence


def shard_schema(*, token_logps: bool, carried: Sequence[str]) -> pa.Schema:
    """Columns of a shard, the same in every shard of a cache."""

    def column(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    def per_branch(item: pa.DataType, *, nullable: bool = False) -> pa.DataType:
        return pa.list_(pa.field("element", item, nullable=nullable))

    source = pa.struct([column("file", pa.string()), column("row", pa.int64())])
    columns = [
        column("row_id", pa.string()),
        column("source", source),
        column("prompt_key", pa.binary(16)),
        column("split_key", pa.uint64()),
        column("prompt_sketch", pa.uint64()),
        column("prompt_tokens", pa.int32()),
        column("prompt_ids", per_branch(pa.int32())),
        column("prompt_cut", pa.int32()),
        column("completion_ids", per_branch(per_branch(pa.int32()))),
        column("role", per_branch(pa.int8())),
        column("score", per_branch(pa.float64(), nullable=True)),
        column("cut", per_branch(pa.int32())),
        column("num_tokens", per_branch(pa.int32())),
        column("ref_logp", per_branch(pa.float64())),
    ]
    if token_logps:
        columns.append(column("ref_token_logps", per_branch(per_branch(pa.float32()))))
    columns += [column(name, pa.float64()) for name in carried]
    return pa.schema(columns)
