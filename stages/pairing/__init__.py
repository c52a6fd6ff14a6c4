"""Sorted rows as a ring: each completion with its KL partners, cut into units."""
