"""DeepSpeed behind a small protocol."""
