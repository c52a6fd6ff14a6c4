"""Cached-reference preference alignment in two stages.

What a notebook wants is imported when it is first used: `import align` alone loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
]

_MODULES = {"AlignError": "schemas.errors", "losses": "stages.methods.api"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'pipeline.commands.python_api')}")
    value = globals()[name] = module if name == "losses" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
