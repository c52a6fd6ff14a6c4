"""Damages data files of every format, and compares the rows that are read with another reader's.

A case ends well if every row that is used is that of the whole file, or what an independent reader
finds in the damaged one, and all others are in quarantine; or if one message names the file.
"""

import random
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import damaged_data, runner  # noqa: E402
from campaigns.cases import Campaign, End, tried  # noqa: E402

from support.read_files import read_in_slices  # noqa: E402


def name_of(seed):
    """The file of a seed."""
    return random.Random(f"file {seed}").choice(list(damaged_data.FILES))


def case(seed, folder):
    """Reads a damaged file."""
    name = name_of(seed)
    path = folder / "case" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = damaged_data.damaged(damaged_data.FILES[name], random.Random(f"damage {seed}"))
    path.write_bytes(content)
    asked = path.parent if "/" in name else path
    for other, whole in damaged_data.FILES.items():
        if "/" in name and other != name and other.startswith(path.parent.name):
            (folder / "case" / other).write_bytes(whole)
    names = (path.name, str(path))
    return tried(lambda: read_in_slices(asked), names, lambda found: _judged(*found, name, content))


def _judged(records, rejected, name, content):
    """Whether the rows are those of the whole file, or else what a file of these bytes holds."""
    rows = {
        one.row: [damaged_data.text_of(one.prompt), *map(damaged_data.text_of, one.completions)]
        for one in records
    }
    count = len(records) + len(rejected)
    whole = [list(row) for row in damaged_data.TEXTS]
    if not _difference(rows, count, whole):
        return End("quarantined" if rejected else "same")
    try:
        other = damaged_data.rows_in(name, content)
    except BaseException as error:  # polars raises its panics as one
        if isinstance(error, KeyboardInterrupt):
            raise
        return _unjudged(rows, count, name, f"{type(error).__name__}: {error}"[:200])
    difference = _difference(rows, count, other)
    return End("wrong" if difference else "changed", difference[:300])


def _difference(rows, count, expected):
    if count != len(expected):
        return f"{count} rows and not {len(expected)}"
    wrong = next((row for row, found in rows.items() if found != expected[row]), None)
    return "" if wrong is None else f"row {wrong}: {rows[wrong]} and not {expected[wrong]}"


def _unjudged(rows, count, name, why):
    """Of bytes that the other reader refuses: text is wrong, and so is a row more or less."""
    if name.startswith(("json", "csv")) or count != damaged_data.ROWS:
        return End("wrong", f"{count} rows; the other reader: {why}")
    strays = [text for row in rows.values() for text in row if not text or not text.isprintable()]
    return End("changed", f"the other reader: {why}; {len(strays)} odd texts")


def with_any_text():
    """Reads bytes that are no text as if they were."""
    from align.stages.data import decode_rows  # noqa: PLC0415

    strict = decode_rows._json_object
    decode_rows._json_object = lambda text, columns: strict(
        text.decode("utf-8", "replace").encode(), columns
    )


CAMPAIGN = Campaign(__file__, name_of, case, plants={"text": with_any_text})

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
