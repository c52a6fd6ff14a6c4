"""What things are: frozen dataclasses and Arrow schemas, no I/O and no model code."""
