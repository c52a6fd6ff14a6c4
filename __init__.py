"""Cached-reference preference alignment in two stages."""

__version__ = "0.1.0"
