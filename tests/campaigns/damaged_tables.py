"""Shards whose rows, columns or writer are other ones, in Parquet that is whole by itself."""

import math

import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 1024  # the tokens that the caches' model knows


def other_table(path, draw):
    """Writes a shard's rows with another value, another shape, or by another writer."""
    whole = table = pq.read_table(path)
    edits = [_other_value] * 6 + [_other_lists] * 3 + [_other_columns, _other_writer] * 2
    edit = draw.choice(edits)
    what, table, how = edit(table, draw)
    groups = {"row_group_size": draw.choice([1, 2, 100])}
    with_sums = {"write_page_checksum": draw.random() < 0.8}
    try:
        pq.write_table(table, path, **{"compression": "zstd", **groups, **with_sums, **how})
    except pa.ArrowException:  # nothing where there has to be something: no writer makes that
        pq.write_table(whole, path)
        return "as it was"
    return what


NUMBERS = (-1, 0, 1, 5, 6, 7, VOCABULARY - 1, VOCABULARY, 2**31 - 1, -(2**31), 127, -128, 2**62)
REALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 5.0, -1e300, 1e300, 3.4e38, -1.5)
TEXTS = ("", "x", "0" * 16, "f" * 32, "f" * 32 + "-7", "\0", "../../x", "\x1b[31m", "é" * 99)


def _leaves(value, path=()):
    if isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _leaves(inner, (*path, at))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _put(row, path, value):
    for step in path[:-1]:
        row = row[step]
    row[path[-1]] = value


def _made(rows, table):
    """The rows as a table; None if such a value has no place in one."""
    try:
        return pa.Table.from_pylist(rows, schema=table.schema)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return None


def _other_value(table, draw):
    """One value, or one in each row, is another of its type."""
    name = draw.choice(table.column_names)
    for _ in range(20):
        rows, made = table.to_pylist(), []
        for row in rows if draw.random() < 0.2 else [draw.choice(rows)]:
            leaves = [*_leaves(row[name], (name,))]
            if leaves:
                path, value = draw.choice(leaves)
                kinds = {str: TEXTS, float: REALS, int: NUMBERS}
                other = draw.choice(kinds.get(type(value), (b"\0" * 16, b"\xff" * 16)))
                _put(row, path, other)
                made.append(f"{'.'.join(map(str, path))} = {other!r}")
        if made and (changed := _made(rows, table)) is not None:
            return f"{len(made)} values, {made[0]}", changed, {}
    return "as it was", table, {}


COUNTS = {"prompt_ids": "prompt_tokens", "completion_ids": "num_tokens"}


def _other_lists(table, draw):
    """Lists of other lengths, in one column or in all that go with it."""
    rows = table.to_pylist()
    row = draw.choice(rows)
    way = draw.choice(
        ["empty", "shorter", "longer", "branch less", "branch more", "rows", "no rows"]
    )
    if way == "rows":
        rows = draw.choices(rows, k=draw.choice([1, 3, 20]))
    elif way == "no rows":
        rows = []
    elif way.startswith("branch"):
        wide = [name for name, value in row.items() if isinstance(value, list)]
        wide = [name for name in wide if name != "prompt_ids"]
        for name in wide if draw.random() < 0.7 else [draw.choice(wide)]:
            row[name] = row[name][1:] if way.endswith("less") else [*row[name], row[name][0]]
    else:
        resized = {"empty": lambda v: [], "shorter": lambda v: v[1:], "longer": lambda v: [*v, *v]}
        side, fits = draw.choice([*COUNTS]), draw.random() < 0.7
        if side == "prompt_ids":
            row[side] = resized[way](row[side])
            row["prompt_tokens"] = len(row[side]) if fits else row["prompt_tokens"]
        else:
            at = draw.randrange(len(row[side]))
            row[side][at] = resized[way](row[side][at])
            if fits:
                row["num_tokens"][at] = len(row[side][at])
                if "ref_token_logps" in row:
                    row["ref_token_logps"][at] = resized[way](row["ref_token_logps"][at])
    return f"lists: {way}", pa.Table.from_pylist(rows, schema=table.schema), {}


def _other_columns(table, draw):
    """Other columns, or other types of them."""
    at = draw.randrange(table.num_columns)
    name, field = table.column_names[at], table.schema.field(at)
    way = draw.choice(["less", "twice", "renamed", "more", "nullable", "null", "wide", "turns"])
    column = table.column(at)
    if way == "less":
        table = table.remove_column(at)
    elif way == "twice":
        table = table.append_column(field, column)
    elif way == "renamed":
        table = table.rename_columns(
            [*table.column_names[:at], draw.choice(["x", ""]), *table.column_names[at + 1 :]]
        )
    elif way == "more":
        kind = draw.choice([pa.float64(), pa.string(), pa.list_(pa.int32()), pa.bool_()])
        table = table.append_column("more", pa.nulls(len(table), kind))
    elif way == "nullable":
        table = table.set_column(at, field.with_nullable(True), column)
    elif way == "null":
        nothing = pa.nulls(len(table), field.type)
        table = table.set_column(at, field.with_nullable(True), nothing)
    elif way == "turns" and "completion_turns" not in table.column_names:
        kind = pa.list_(
            pa.field(
                "element", pa.list_(pa.field("element", pa.int16(), nullable=False)), nullable=False
            )
        )
        numbers = [draw.choice([0, 1, -1, 2, 3, -32768, 32767]) for _ in range(9)]
        lists = [
            [[draw.choice(numbers) for _ in ids] for ids in row]
            for row in table.column("completion_ids").to_pylist()
        ]
        turns = pa.array(lists, kind)
        table = table.append_column(pa.field("completion_turns", kind, nullable=False), turns)
    else:
        text = pa.array(["1"] * len(table), pa.large_string())
        table = table.set_column(at, pa.field(name, pa.large_string(), nullable=False), text)
    return f"columns: {way} {name}", table, {}


def _other_writer(table, draw):
    """The same rows by a writer with other habits."""
    how = draw.choice(
        [
            {"compression": "snappy"},
            {"compression": "none"},
            {"data_page_version": "2.0"},
            {"use_dictionary": False, "write_statistics": True},
            {"version": "1.0"},
            {"store_schema": False},
        ]
    )
    if draw.random() < 0.2:
        table = table.replace_schema_metadata({"x" * 99: "y" * 100_000, "ARROW:schema": "AAAA"})
    return f"written with {how}", table, how
