"""Encoded rows by key range; each completion gets its KL completions, shard by shard."""
