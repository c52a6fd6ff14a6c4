"""In which order things are done."""
