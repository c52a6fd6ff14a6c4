"""Encoded rows on the ring: sorted, each with its KL partners, cut into units."""
