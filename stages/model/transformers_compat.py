"""transformers' modelling code, without what only models of images need.

Its losses for object detection load scipy wherever that is installed, which costs any other model
36 MiB. They are imported here as if it were not, and never learn that it is; all else does.
"""

from __future__ import annotations

from typing import Any

from transformers import utils

__all__ = ["AttentionInterface"]

_utils: Any = utils
_asked = _utils.is_scipy_available
_utils.is_scipy_available = lambda: False
try:
    from transformers.modeling_utils import AttentionInterface
finally:
    _utils.is_scipy_available = _asked
