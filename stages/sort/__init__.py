"""An external sort: rows are divided by key range, sorted, and read by row, completion or key."""
