"""Prompts, each asked once, to the table of their samples."""
