"""Reads files of preference data into encoded rows, in bounded memory.

In reading order: `files` (folders, splits, slices) and `readers` (rows as dicts); `columns` (the
shape of a file), `shapes` and `row_parts` (the table of shapes, and the readers of their parts);
`text_rows` and `cells` (a checked row); `tokenizer`, `chat_template`, `stop_tokens` and `encode`
(its tokens). Also `given_rows` (rows from Python) and `preview` (a row as a model reads it).
"""
