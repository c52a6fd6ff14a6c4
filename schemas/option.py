"""Shared types of the settings' models, and the error message for a wrong value."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, ValidationError

from .errors import closest, did_you_mean

# Strict: a boolean is not a number, and a number is not text. A model is built at its first use.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

PATH = "path"  # marks settings that are paths, relative to the config file that sets them
PathStr: TypeAlias = Annotated[str, PATH]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # of a path that is written NAME=PATH
# The score that separates desirable from undesirable: a prompt's mean or median, or a number.
Threshold: TypeAlias = Literal["mean", "median"] | float


def as_list(value: Any) -> Any:
    """A text as a list of one; an empty text as an empty list."""
    if isinstance(value, str):
        return [value] if value else []
    return value


# A list of paths, each written PATH or NAME=PATH; a text is one of them.
NamedPaths: TypeAlias = Annotated[list[PathStr], BeforeValidator(as_list)]


def named_path(text: str) -> tuple[str, str]:
    """The name and the path of NAME=PATH; a path alone has an empty name."""
    name, _, path = text.partition("=")
    return (name, path) if path and NAME.fullmatch(name) else ("", text)


def wrong_value(error: ValidationError) -> str:
    """The message for the first wrong setting, without its name: `should be …, found …`."""
    errors = error.errors(include_url=False)
    key, found = errors[0]["loc"][0], errors[0]["input"]
    # A value of several types has an error for each of them.
    words = [one["msg"].removeprefix("Input should be ") for one in errors if one["loc"][0] == key]
    expected = " or ".join(dict.fromkeys(words)).replace("a valid boolean", "true or false")
    hint = did_you_mean(closest(str(found), re.findall("'([^']+)'", expected)))
    return f"should be {expected}, found {found!r:.60}.{hint}"
