"""A tiny made-up world: preference text, a tokenizer, a model and data files, all from one seed."""
