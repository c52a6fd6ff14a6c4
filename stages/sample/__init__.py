"""Builds the table of samples from prompts and their sampled completions."""
