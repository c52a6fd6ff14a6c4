"""Encoded rows by key range; each completion gets its KL partners, shard by shard."""
