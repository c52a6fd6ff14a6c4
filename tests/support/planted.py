"""Everything that commands left on disk, to look for planted secrets in."""

import sqlite3
from contextlib import closing


def contents_below(*folders):
    """Every file below the folders with its bytes; those of a database as text as well."""
    for path in (one for folder in folders for one in folder.rglob("*") if one.is_file()):
        held = path.read_bytes()
        if held.startswith(b"SQLite format 3"):
            with closing(sqlite3.connect(path)) as database:
                held += "\n".join(database.iterdump()).encode()
        yield path, held
