"""Cached-reference preference alignment in two stages.

What a notebook wants is imported when it is first used: `import align` alone loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pipeline.commands import trl_reference as trl
    from .pipeline.commands.python_api import TrainingRun, load_cache, load_run, precompute, train
    from .schemas.errors import AlignError
    from .stages.methods import api as losses

__version__ = "0.1.0"
__all__ = [
    "AlignError",
    "TrainingRun",
    "load_cache",
    "load_run",
    "losses",
    "precompute",
    "train",
    "trl",
]

_MODULES = {"AlignError": "schemas.errors"}
_WHOLE = {"losses": "stages.methods.api", "trl": "pipeline.commands.trl_reference"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = (_MODULES | _WHOLE).get(name, "pipeline.commands.python_api")
    module = import_module(f"{__name__}.{file}")
    value = globals()[name] = module if name in _WHOLE else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
