"""Detects the shape of data files from their columns, and finds columns that are not read."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.row_table import RESERVED
from ...schemas.rows import BadRow
from .files import InputFile, rows_of
from .shapes import OPTIONAL, PROMPTS, SHAPES, DataShape, Shape

_ALIASES = {"score_chosen": "chosen_score", "score_rejected": "rejected_score"}
ALWAYS_CARRIED = ("margin", "weight")
OURS = ("paired", "unpaired", "scored", "scored_long")
# Columns of preference data, in any shape.
KNOWN = {"prompt", *OPTIONAL, *ALWAYS_CARRIED, *_ALIASES}.union(
    *((*one.columns, *one.scores) for one in SHAPES if one.name in OURS)
)
_PROMPT_LIKE = ("question", "instruction", "query", "input", "context")
# Columns with a part of the prompt, by the column with the rest.
_PARTS = {"instruction": ("input", "history"), "query": ("history",), "question": ("context",)}
# Usual names of align's columns in files of no known shape.
_USUAL = {
    "prompt": _PROMPT_LIKE,
    "completion": ("response", "answer", "output"),
    "completions": ("responses", "answers", "outputs"),
    "score": ("rating", "reward"),
}
# Columns that hold whole conversations, and the columns that would make them preferences.
_UNJUDGED = {"messages": "label or rejected_response", "conversations": "label"}
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_EVERY = KNOWN.union(*((*one.columns, *one.optional) for one in SHAPES))
_LISTED = 8


def common_shape(
    inputs: Sequence[InputFile], mapped: Mapping[str, str], carry: Sequence[str] = ()
) -> Shape:
    """The one shape of all files; files that differ are refused.

    `mapped` gives the user's name for align's columns; an empty name leaves a column out.
    """
    named = _with_spread(inputs, mapped)
    first, *others = [
        detect_shape(columns, mapped, carry, where=str(file.path))
        for file, columns in zip(inputs, named, strict=True)
    ]

    def essence(shape: Shape) -> tuple[object, ...]:
        scores = [shape.source.get(name) for name in shape.declared.scores]
        return shape.declared, scores, shape.carried

    for file, shape in zip(inputs[1:], others, strict=True):
        if essence(shape) != essence(first):
            raise UsageError(
                f"{inputs[0].path} and {file.path} hold different data: {first.read_as}; and "
                f"{shape.read_as}. Give a run files of one shape."
            )
    every = (first, *others)
    found = replace(
        first,
        optional=tuple(dict.fromkeys(name for one in every for name in one.optional)),
        unread=tuple(dict.fromkeys(name for one in every for name in one.unread)),
    )
    _require_whole(inputs, found)
    return found


def _with_spread(inputs: Sequence[InputFile], mapped: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The columns of each file; optional or left-out columns may be missing in some files."""
    every = {name for file in inputs for name in file.columns}
    may_lack = [theirs for ours, theirs in mapped.items() if ours in OPTIONAL and theirs]
    may_lack += [ours for ours, theirs in mapped.items() if not theirs]
    spread = [name for name in may_lack if name in every]
    return [tuple(dict.fromkeys((*file.columns, *spread))) for file in inputs]


def prompt_shapes(inputs: Sequence[InputFile], mapped: Mapping[str, str]) -> Iterator[Shape]:
    """The shape of each file for reading its prompts: stage 1's, or prompts alone."""
    for file, columns in zip(inputs, _with_spread(inputs, mapped), strict=True):
        where = str(file.path)
        found = _renamed(columns, mapped, where)
        fitting = _fitting(found)
        if len({one.prompt for one in fitting}) == 1:  # they differ in other columns only
            fitting = fitting[:1]
        if not fitting and "prompt" in found:
            fitting = [PROMPTS]
        if not fitting:
            raise UsageError(
                f"{where} has the columns {_quoted(columns)} and no prompts among them. Name the "
                "column of prompts: --map prompt=YOURS."
            )
        shape = _shape(_only(fitting, found, where), found, mapped, (), where)
        _require_whole([file], shape)
        yield shape


def detect_shape(
    columns: Sequence[str], mapped: Mapping[str, str], carry: Sequence[str], *, where: str
) -> Shape:
    """The shape of these columns; `where` names the file in errors."""
    found = _renamed(columns, mapped, where)
    fitting = _fitting(found)
    unknown = [one for one in mapped.items() if one[1] and one[0] not in {*_EVERY, *carry}]
    if unknown and not fitting:
        ours, theirs = unknown[0]
        raise UsageError(
            f"--map {ours}={theirs}: no shape of preference data has a column {ours!r}."
            f"{did_you_mean(closest(ours, _EVERY))} Write OURS=YOURS."
        )
    return _shape(_only(fitting, found, where), found, mapped, carry, where)


def _renamed(columns: Sequence[str], mapped: Mapping[str, str], where: str) -> dict[str, str]:
    """The user's name of each column by align's name, without columns that are left out."""
    ours = {theirs or name: name if theirs else None for name, theirs in mapped.items()}
    for name in ours:
        if name not in columns:
            raise UsageError(
                f"{where} has no column {name!r} to rename; it has {_quoted(columns)}."
                f"{did_you_mean(closest(name, columns))} Change --map."
            )
    found: dict[str, str] = {}
    for column in columns:
        called = ours.get(column, _ALIASES.get(column, column))
        if called is None:
            continue
        if called in found:
            raise UsageError(
                f"{where}: the columns {found[called]!r} and {column!r} would both be {called!r}. "
                f"Keep one of them: --map {column}= leaves a column out."
            )
        found[called] = column
    return found


def _fitting(found: Mapping[str, str]) -> list[DataShape]:
    """The shapes whose columns are all there, except those that another such shape includes."""
    fitting = [
        one
        for one in SHAPES
        if found.keys() >= {*one.columns}
        and ("prompt" not in found or "prompt" in (*one.columns, *one.optional))
    ]
    return [one for one in fitting if not any(_says_more(other, one) for other in fitting)]


def _says_more(other: DataShape, one: DataShape) -> bool:
    """Whether a shape reads all columns of the other, and the other does not read all of its."""
    if not {*one.columns} <= {*other.columns, *other.optional, *OPTIONAL}:
        return False
    is_mutual = {*other.columns} <= {*one.columns, *one.optional, *OPTIONAL}
    return not is_mutual or len(other.columns) > len(one.columns)


def _only(fitting: Sequence[DataShape], found: Mapping[str, str], where: str) -> DataShape:
    """The one shape that fits; refuses none, several, or a prompt under another name."""
    if not fitting:
        raise _no_shape(found, where)
    one, *others = fitting
    # If two columns tell the good answer, the first one is read; the "read as" line names it.
    if others := [other for other in others if replace(other, good=one.good) != one]:
        extra = next(name for name in others[0].columns if name not in one.columns)
        shapes = " and ".join(f"{each.name} ({_quoted(each.columns)})" for each in (one, *others))
        raise UsageError(
            f"{where} fits several shapes of preference data: {shapes}. Leave out a column of the "
            f"unwanted shape, for example with --map {found[extra]}=."
        )
    if one.name in OURS and not one.prompt:
        for name in _PROMPT_LIKE:
            if name in found:
                raise UsageError(
                    f"{where} has no column 'prompt' but one named {name!r}. Pass --map "
                    f"prompt={name} if that is the prompt, or --map {name}= if chosen and "
                    "rejected begin with the prompt."
                )
    return one


def _no_shape(found: Mapping[str, str], where: str) -> UsageError:
    for column, judged_by in _UNJUDGED.items():
        if column in found and found.keys() <= {column, *OPTIONAL}:
            return UsageError(
                f"{where}: {found[column]} hold no preference: add {judged_by}, or name your "
                "column, for example --map label=YOURS."
            )
    ours = [one for one in SHAPES if one.name in OURS]
    known = "; ".join(f"{one.name}: {', '.join(one.columns)}" for one in ours)
    spare = [column for name, column in found.items() if name not in KNOWN]

    def named(one: DataShape) -> dict[str, str]:
        """The user's columns for those that the shape lacks; YOURS if no name is near."""
        theirs: dict[str, str] = {}
        for name in one.columns:
            if name not in found:
                free = [column for column in spare if column not in theirs.values()]
                usual = [column for column in _USUAL.get(name, ()) if column in free]
                theirs[name] = next(iter(usual or closest(name, free)), "YOURS")
        return theirs

    def nearness(one: DataShape) -> tuple[int, bool]:
        """The number of columns that are there or guessed; whether there are enough others."""
        lacking = named(one)
        unknown = [*lacking.values()].count("YOURS")
        return len(one.columns) - unknown, len(lacking) <= len(spare)

    best = named(max(ours, key=nearness))
    flags = [f"--map {shlex.quote(f'{name}={theirs}')}" for name, theirs in best.items()]
    return UsageError(
        f"{where} has the columns {_quoted(found.values())}, which fit no shape of preference data "
        f"({known}; and those of docs/data.md). Name yours: {' '.join(flags)}."
    )


def _shape(
    declared: DataShape,
    found: Mapping[str, str],
    mapped: Mapping[str, str],
    carry: Sequence[str],
    where: str,
) -> Shape:
    for name in carry:
        if name in RESERVED:
            raise UsageError(
                f"{where}: the column {name!r} cannot be carried, because shards have a column of "
                f"that name. Rename yours, for example with --map my_{name}={name}."
            )
        if name not in found:
            raise UsageError(
                f"{where} has no column {name!r} to carry; it has {_quoted(found)}."
                f"{did_you_mean(closest(name, found))} Change data.carry."
            )
    always = [name for name in ALWAYS_CARRIED if name in found]
    given = [declared.margin] if declared.margin else []
    carried = tuple(dict.fromkeys((*given, *always, *carry)))
    # A column that the first rows of a JSON file lack may appear later: it is read too.
    names = (*declared.columns, *declared.optional, *OPTIONAL, *carried)
    taken = {theirs or ours for ours, theirs in mapped.items()}
    source = {name: found.get(name, name) for name in names if name in found or name not in taken}
    source.update({name: found[name] for name in declared.scores if name in found})
    return Shape(
        declared,
        source,
        optional=tuple(name for name in (*declared.optional, *OPTIONAL) if name in found),
        carried=carried,
        unread=tuple(column for column in found.values() if column not in source.values()),
    )


def _require_whole(inputs: Sequence[InputFile], shape: Shape) -> None:
    """Refuses unread columns that change the meaning of a row: parts of a prompt, and media.

    A column without values is accepted.
    """
    prompt = shape.declared.prompt
    asked = shape.source[prompt.columns[0].partition(".")[0]] if prompt else ""
    parts = dict.fromkeys(_PARTS.get(asked, ()), f"a part of the prompt beside {asked!r}")
    media = dict.fromkeys(_MEDIA, "media that no model here reads")
    for name, why in (parts | media).items():
        for file in inputs if name in shape.unread else ():
            if name not in file.columns:
                continue
            cells = (one.get(name) for one in rows_of(file, [name]) if not isinstance(one, BadRow))
            if any(cell and not (isinstance(cell, str) and cell.isspace()) for cell in cells):
                raise UsageError(
                    f"{file.path} has {name!r}, {why}: it would not be read. Write its text into "
                    f"the prompt in your file, or leave it out with --map {name}=."
                )


def require_scores(inputs: Sequence[InputFile], shape: Shape) -> None:
    """Refuses completions without scores: no method learns from them."""
    if not shape.lacks_scores:
        return
    name = next(iter(shape.declared.scores), "score")
    raise UsageError(
        f"{inputs[0].path} has {shape.name} rows without scores, so no method could learn from "
        f"its cache. Name their column with --map {name}=YOURS (or those of prompt, completion and "
        "label), or let `align score` or `align judge` give them some."
    )


def not_read(names: Sequence[str]) -> str:
    """The note that names the columns that are not read."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"columns that are not read: {_quoted(names[:_LISTED])}{more}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
