"""Cached-reference preference alignment in two stages."""

import os

__version__ = "0.1.0"

# Arrow reads this when it is first imported. Its own pool keeps what was freed, beside what
# torch then takes; the C library's gives both the same memory.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
