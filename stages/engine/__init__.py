"""DeepSpeed as the trainer's engine, and its ranks."""
