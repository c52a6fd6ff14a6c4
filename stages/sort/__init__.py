"""An external sort: rows are divided by key range, sorted, and read by row or completion."""
