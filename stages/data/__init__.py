"""Reads files of preference data into encoded rows, in bounded memory.

In reading order: `files` (folders, splits, slices) and `readers` (rows as dicts); `columns` (which
shape a file has), `shapes` and `row_parts` (the table of shapes, and the ways to read their parts);
`records` and `cells` (a row, checked); `tokenizer`, `chat_template`, `stop_tokens` and `encode`
(its tokens). Beside them `given_rows` (rows from Python) and `preview` (a row as a model reads it).
"""
