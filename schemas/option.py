"""What the models of settings have in common: how strict they are, and which settings are paths."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import ConfigDict

# A boolean is no number and a number is no text. A model is built when it is first used.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

PATH = "path"  # in a config file such a setting is relative to that file
PathStr: TypeAlias = Annotated[str, PATH]
