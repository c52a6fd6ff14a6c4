"""Encoded rows by key range: each completion with its KL partners, shard by shard."""
