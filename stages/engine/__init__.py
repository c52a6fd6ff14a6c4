"""DeepSpeed as the trainer's engine, and the ranks that it runs on."""
