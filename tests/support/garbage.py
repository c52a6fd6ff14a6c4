"""The garbage collector, which should not look through libraries again and again."""

import gc
import sys

MANY = 100
_freeze, _known = gc.freeze, 0  # modules when it froze last


def freeze_modules():
    """Freezes what there is, if many modules were imported since the last time.

    They are never garbage, and looking through them takes 0.2 s in each start of an engine.
    """
    global _known  # noqa: PLW0603
    if len(sys.modules) > _known + MANY:
        gc.collect()
        _freeze()
        _known = len(sys.modules)
