"""What the models of settings have in common: how strict they are, and what a wrong value is."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, ValidationError

from .errors import closest, did_you_mean

# A boolean is no number and a number is no text. A model is built when it is first used.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

PATH = "path"  # in a config file such a setting is relative to that file
PathStr: TypeAlias = Annotated[str, PATH]
# Where scores part the desirable from the undesirable: at the mean of a prompt's, or at a number.
Threshold: TypeAlias = Literal["mean", "median"] | float


def wrong_value(error: ValidationError) -> str:
    """What the first wrong value of a model should be, and what was found, for behind its name."""
    errors = error.errors(include_url=False)
    key, found = errors[0]["loc"][0], errors[0]["input"]
    # A value of several types has an error for each of them.
    words = [one["msg"].removeprefix("Input should be ") for one in errors if one["loc"][0] == key]
    expected = " or ".join(dict.fromkeys(words)).replace("a valid boolean", "true or false")
    hint = did_you_mean(closest(str(found), re.findall("'([^']+)'", expected)))
    return f"should be {expected}, found {found!r:.60}.{hint}"
