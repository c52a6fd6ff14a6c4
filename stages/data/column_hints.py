"""Names the columns of a file that are likely meant, by their words and never by their spelling."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...schemas.errors import closest
from .data_shape import DataShape
from .validate import LABELS

PROMPT_LIKE = ("question", "instruction", "query", "input", "context")
# Words of the names that a column of ours has elsewhere; the first that fits is taken.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "prompt": (*PROMPT_LIKE, "trajectory", "problem", "conversations", "history", "post"),
    "chosen": ("chosen", "preferred", "better", "positive", "good"),
    "rejected": ("rejected", "dispreferred", "nonpreferred", "worse", "negative", "bad"),
    "completion": ("completion", "response", "answer", "output", "reply", "generation"),
    "completions": ("completions", "responses", "answers", "outputs", "replies", "generations"),
    "label": ("label", "kto", "desirable", "safe", "correct", "liked", "thumbs", "preference"),
    "score": ("score", "rating", "reward"),
    "scores": ("scores", "ratings", "rewards"),
}
# A column of these says something about another one.
_ABOUT = re.compile(
    "scores?|ratings?|rewards?|models?|ids?|len(gth)?|tokens|source|rank|policy|index|count|num|"
    "date|time|type|name|url|lang(uage)?"
)
_TYPO = 0.8  # two names as similar as this are one name
_SIDES = (("1", "2"), ("0", "1"), ("a", "b"), ("A", "B"), ("w", "l"))


def likely(ours: str, names: Collection[str]) -> str:
    """The column that most likely is one of ours; nothing where none is."""
    exact = [name for name in names if _is_typo(name, ours)]
    if exact:
        return exact[0]
    for word in _WORDS.get(ours, ()):
        for name in names:
            words = _words(name)
            if word in words and ("score" in ours or not any(map(_ABOUT.fullmatch, words))):
                return name
    return ""


def _is_typo(name: str, ours: str) -> bool:
    return closest(ours, [name], cutoff=_TYPO) == [name]


def _words(name: str) -> list[str]:
    split = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    found = re.findall(r"[a-z]+", split.lower())
    return ["nonpreferred", *found[2:]] if found[:2] == ["non", "preferred"] else found


def two_answers(names: Collection[str]) -> tuple[str, str] | None:
    """Two columns of answers that differ in a number or a letter, in that order."""
    for first, second in _SIDES:
        for name in names:
            other = name[: -len(first)] + second
            if name.endswith(first) and other in names and likely("completion", [name]):
                return name, other
    return None


def no_shape(
    shapes: Sequence[DataShape], found: Mapping[str, str], ours: Collection[str], where: str
) -> str:
    """The refusal of columns that fit none of the shapes; `found` gives the user's names."""
    known = "; ".join(f"{one.name}: {', '.join(one.columns)}" for one in shapes)
    may_have = " and ".join(one.name for one in shapes if "prompt" not in one.columns)
    begins = (
        f"{where} has the columns {listed(found.values())}, which fit no shape of preference "
        f"data ({known}; {may_have} may also have a prompt). "
    )
    spare = {name: column for name, column in found.items() if name not in ours}
    flags = {one.name: _flags(one, found, spare) for one in shapes}
    unknown = {name: [*columns.values()].count("") for name, columns in flags.items()}
    # With as few columns left to find as there are, the one of which most are found.
    nearest = min(shapes, key=lambda one: (unknown[one.name], -len(flags[one.name])))
    two = two_answers([*spare])
    if two and (unknown[nearest.name] or not {*two}.isdisjoint(flags[nearest.name].values())):
        first, second = (spare[name] for name in two)
        asked = "" if "prompt" in found else spare.get(likely("prompt", [*spare]), "")
        pair = {"chosen": first, "rejected": second} | ({"prompt": asked} if asked else {})
        return (
            f"{begins}{first!r} and {second!r} may be two answers, and nothing that is known here "
            f"says which is the better one: {_written(pair)} if it is always the first."
        )
    missing = [name for name in nearest.columns if name not in found]
    labels = f" Labels are {LABELS}." if "label" in missing else ""
    return (
        f"{begins}Nearest are {', '.join(nearest.columns)}: name the columns for "
        f"{' and '.join(missing)}, for example {_written(flags[nearest.name])}.{labels}"
    )


def _flags(one: DataShape, found: Mapping[str, str], spare: Mapping[str, str]) -> dict[str, str]:
    """The user's column for each that a shape lacks, and for its prompt where one is likely."""
    flags: dict[str, str] = {}
    for name in dict.fromkeys((*one.columns, "prompt")):
        left = [ours for ours in spare if spare[ours] not in flags.values()]
        near = spare.get(likely(name, left), "")
        if name not in found and (near or name in one.columns):
            flags[name] = near
    return flags


def _written(flags: Mapping[str, str]) -> str:
    columns = {name: column or "YOURS" for name, column in flags.items()}
    return " ".join(f"--map {shlex.quote(f'{name}={column}')}" for name, column in columns.items())


def several_shapes(fitting: Sequence[DataShape], found: Mapping[str, str], where: str) -> str:
    """The refusal of columns that fit several shapes, with the way to each of them."""
    same = len({one.name for one in fitting}) < len(fitting)
    names = [f"{one.name} ({listed(one.columns)})" if same else one.name for one in fitting]
    ways = []
    for one, name in zip(fitting, names, strict=True):
        others = [other.columns for other in fitting if other != one]
        extra = dict.fromkeys(
            next(name for name in columns if name not in (*one.columns, "prompt"))
            for columns in others
        )
        ways.append(f"{name} with " + " ".join(f"--map {found[name]}=" for name in extra))
    return (
        f"{where} fits {len(fitting)} shapes of preference data: {' and '.join(names)}. "
        f"Choose {', or '.join(ways)}."
    )


def listed(names: Iterable[str]) -> str:
    """Names in quotes."""
    return ", ".join(map(repr, names))
