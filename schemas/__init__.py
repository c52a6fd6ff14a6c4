"""Data types of the project: frozen dataclasses and Arrow schemas, no I/O and no model code."""
