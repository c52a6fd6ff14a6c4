"""Names that have moved to `cache` and `output_folder`."""

from ..output_folder import SCORES, OutputFolder, is_output, make_place, refuse_foreign
from .cache import PLAN_NAME, part_name
from .cache import Cache as CacheFolder

__all__ = [
    "PLAN_NAME",
    "SCORES",
    "CacheFolder",
    "OutputFolder",
    "is_output",
    "make_place",
    "part_name",
    "refuse_foreign",
]
