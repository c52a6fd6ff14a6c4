"""Detects which shape of preference data a file holds, from the names of its columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...schemas.errors import UsageError, closest, did_you_mean
from ..storage.cache.shards import RESERVED
from .column_hints import PROMPT_LIKE, likely, listed, no_shape, several_shapes
from .data_shape import DataShape, Shape
from .input_files import InputFile, column_names, keys_further_on
from .known_shapes import DATA_SHAPES

ALIASES = {"score_chosen": "chosen_score", "score_rejected": "rejected_score"}
OPTIONAL = ("system", "tools", "chat_template_kwargs")
ALWAYS_CARRIED = ("margin", "weight")
_UNUSED = "unused "  # begins our name of a column that the user left out
_SCORE_LIKE = re.compile("score|rating|reward|preference", re.IGNORECASE)
_OURS = [one for one in DATA_SHAPES if not (one.is_foreign or one.is_public)]
_PUBLIC = sorted(
    (one for one in DATA_SHAPES if one.is_public), key=lambda one: -len(one.columns)
)  # the one with more columns says more
_KNOWN = {"prompt", *OPTIONAL, *ALWAYS_CARRIED}.union(
    *((*one.columns, *one.scores) for one in _OURS)
)


def common_shape(
    inputs: Sequence[InputFile], columns: Mapping[str, str], carry: Sequence[str] = ()
) -> Shape:
    """The one shape that all files have; files that differ are an error.

    `columns` gives the user's name of each column; a column with no name is left out.
    """
    rename = _rename(columns)
    first, *others = [
        detect_shape(names, rename, carry, where=str(file.path))
        for file, names in zip(inputs, _columns_of(inputs, rename), strict=True)
    ]
    for file, shape in zip(inputs[1:], others, strict=True):
        if _essence(shape) != _essence(first):
            raise UsageError(
                f"{inputs[0].path} and {file.path} hold different data: {_essence(first)}; "
                f"and {_essence(shape)}. Give files of one shape to a run."
            )
    seen = {name for shape in (first, *others) for name in shape.optional}
    return replace(
        first,
        optional=tuple(name for name in OPTIONAL if name in seen),
        unread=tuple(dict.fromkeys(name for shape in (first, *others) for name in shape.unread)),
        left_out=tuple(theirs for theirs, ours in rename.items() if ours.startswith(_UNUSED)),
    )


def _columns_of(inputs: Sequence[InputFile], rename: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The columns of each file, those of `rename` too that a JSON file has further on.

    Optional ones, and those that are left out, may be in some of the files alone.
    """
    found = []
    for file in inputs:
        names = column_names(file)
        missing = [name for name in rename if name not in names]
        found.append((*names, *(keys_further_on(file, missing) if missing else ())))
    every = {name for names in found for name in names}
    spread = [name for name, ours in rename.items() if name in every and _may_lack(ours)]
    return [(*names, *(name for name in spread if name not in names)) for names in found]


def _may_lack(ours: str) -> bool:
    return ours in OPTIONAL or ours.startswith(_UNUSED)


def foreign_shape(columns: Collection[str], renamed: Mapping[str, str]) -> Shape | None:
    """The shape of others that these columns are of; none where stage 1 may read them."""
    is_ours = any({*ours.columns} <= {*columns} for ours in _OURS)
    for one in DATA_SHAPES:
        has_other_prompt = "prompt" in columns and "prompt" not in one.columns
        if "prompt" in one.columns and (is_ours or renamed.keys() - {"score"}):
            continue  # it could be either, and ours is what was asked for
        if one.is_foreign and not has_other_prompt and set(one.columns) <= set(columns):
            if other := sorted(renamed.keys() - {"score"}):
                raise UsageError(
                    f"--map {other[0]}=…: of a file as {one.name} has it only the score can be "
                    "chosen, for example --map score=overall_score."
                )
            chosen = {ours: theirs for ours, theirs in renamed.items() if theirs}
            names = (*one.columns, *one.may_have)
            return Shape(one, {name: name for name in names} | chosen)
    return None


def require_scores(inputs: Sequence[InputFile], shape: Shape) -> None:
    """Refuses completions that have no scores: no method learns from them."""
    if not shape.lacks_scores:
        return
    path, names = inputs[0].path, column_names(inputs[0])
    completions, scores = shape.declared.columns[-1], shape.declared.scores[0]
    theirs = [*shape.unread, "YOURS"][0]
    labels = [name for name in names if "label" in name.lower()]
    by_row = (
        f"{labels[0]!r} is read of one completion in a row: write a row for each." if labels else ""
    )
    raise UsageError(
        f"{path} has {shape.source[completions]!r} and no scores of them, so no method could "
        f"learn from its cache. Name their column with --map {scores}={theirs}, or "
        f"have a reward model score them: align score {path} --reward-model DIR. {by_row}"
    )


@dataclass(frozen=True)
class PromptColumns:
    """The columns that prompts are read from, by our names, and those that go with them."""

    source: Mapping[str, str]  # without a prompt for pairs that begin with theirs
    carried: Mapping[str, str]
    known: frozenset[str]  # the user's; those of a JSON file that are not are further on in it


def prompt_columns(inputs: Sequence[InputFile], columns: Mapping[str, str]) -> PromptColumns:
    """Those of files with a column of prompts, or of pairs that begin with theirs."""
    rename = _rename(columns)
    found = [
        _renamed(names, rename, _KNOWN, where=str(file.path))
        for file, names in zip(inputs, _columns_of(inputs, rename), strict=True)
    ]
    for file, names in zip(inputs, found, strict=True):
        if ("prompt" in names) != ("prompt" in found[0]):
            raise UsageError(
                f"Of {inputs[0].path} and {file.path} one has prompts and the other has none. "
                "Sample them apart, or name the column with --map prompt=YOURS."
            )
    has_prompt = "prompt" in found[0]
    if not has_prompt:
        _require_pairs(found[0], str(inputs[0].path))
    every: dict[str, str] = {}
    for names in found:
        every = {**every, **{name: names[name] for name in names if name not in every}}
    wanted = [*(["prompt"] if has_prompt else []), *OPTIONAL]
    source = {n: every.get(n, n) for n in wanted if n in every or n not in rename}
    carried = {
        name: column
        for name, column in every.items()
        if name not in _KNOWN and not name.startswith(_UNUSED)
    }
    named = {*source.values(), *every.values(), *(_KNOWN.union(ALIASES) - rename.keys())}
    return PromptColumns(source, carried, frozenset(named))


def _require_pairs(found: Mapping[str, str], where: str) -> None:
    if any(set(one.columns) <= set(found) for one in _OURS):  # none of them with a prompt
        _require_no_other_prompt(found, where)
        return
    flag = f"prompt={found.get(likely('prompt', found), 'YOURS')}"
    raise UsageError(
        f"{where} has the columns {listed(found.values())} and none of prompts. Name the one that "
        f"holds them: --map {flag}."
    )


def _essence(shape: Shape) -> str:
    prompt = "" if shape.has_prompt else ", without a prompt"
    scores = [shape.source[name] for name in shape.declared.scores if name in shape.source]
    read = (*scores, *shape.carried)
    return f"{shape.kind}{prompt}" + (f", with {' and '.join(read)}" if read else "")


def detect_shape(
    columns: Sequence[str], rename: Mapping[str, str], carry: Sequence[str] = (), *, where: str
) -> Shape:
    """Returns the shape of these columns after renaming; `where` names the file in errors."""
    if public := _public(columns, rename, where):
        return _public_shape(public, columns, rename, carry, where)
    found = _renamed(columns, rename, _KNOWN.union(carry), where)
    _require_carry(found, carry, where)
    declared = _declared(found, where)
    if "prompt" not in found:  # nor among the columns that the shape has
        _require_no_other_prompt(found, where)
    carried = tuple(name for name in ALWAYS_CARRIED if name in found)
    names = ["prompt", *declared.columns, *OPTIONAL, *carried, *carry]
    # A column not seen in the first rows of a JSON file may appear later: it is read too.
    source = {name: found.get(name, name) for name in names if name in found or name not in rename}
    source.update({name: found[name] for name in declared.scores if name in found})
    return Shape(
        declared,
        source,
        tuple(name for name in OPTIONAL if name in found),
        tuple(dict.fromkeys((*carried, *carry))),
        "prompt" in found,
        tuple(column for name, column in found.items() if _is_unread_score(name, source)),
    )


def _public(columns: Sequence[str], rename: Mapping[str, str], where: str) -> DataShape | None:
    """The public shape that a file has; none where columns of it are left out or renamed."""
    there = {name for name in columns if not rename.get(name, "").startswith(_UNUSED)}
    fitting: list[DataShape] = []
    for one in _PUBLIC:
        if not set(one.columns) <= there or ("prompt" in there and "prompt" not in one.columns):
            continue
        if any(
            set(one.columns) <= {*other.columns, *other.may_have, *OPTIONAL} for other in fitting
        ):
            continue  # the other says more
        renamed = [name for name in one.columns if name in rename]
        if one.one_meaning and renamed:
            raise UsageError(
                f"{where} has rows as {one.name} has them ({listed(one.columns)}), and "
                f"--map {rename[renamed[0]]}={renamed[0]} would read a part of them alone. "
                f"{one.refusal or 'They are read as they are: leave --map out.'}"
            )
        if not renamed:
            fitting.append(one)
    if len(fitting) > 1:
        raise UsageError(several_shapes(fitting, {name: name for name in columns}, where))
    if fitting and fitting[0].refusal:
        raise UsageError(f"{where} has rows as {fitting[0].name} has them. {fitting[0].refusal}")
    return fitting[0] if fitting else None


def _public_shape(
    declared: DataShape,
    columns: Sequence[str],
    rename: Mapping[str, str],
    carry: Sequence[str],
    where: str,
) -> Shape:
    found = _renamed(columns, rename, {*_KNOWN, *declared.columns, *carry}, where)
    _require_carry(found, carry, where)
    names = (*declared.columns, *declared.may_have, *OPTIONAL)
    always = (name for name in ALWAYS_CARRIED if name in found)
    kept = tuple(dict.fromkeys((*declared.gives, *always, *carry)))
    source = {name: found.get(name, name) for name in (*names, *kept) if name in found}
    later = (name for name in names if name not in found and name not in rename)
    source.update({name: name for name in (*later, *declared.gives) if name not in source})
    source.update({name: found[name] for name in declared.scores if name in found})
    unread = (column for name, column in found.items() if _is_unread_score(name, source))
    optional = tuple(name for name in OPTIONAL if name in found)
    return Shape(declared, source, optional, kept, False, tuple(unread))


def _is_unread_score(name: str, source: Mapping[str, str]) -> bool:
    left_out = name.startswith(_UNUSED)
    return name not in source and not left_out and bool(_SCORE_LIKE.search(name))


def _rename(columns: Mapping[str, str]) -> dict[str, str]:
    """Our name of each of the user's columns that has another one, or is left out."""
    return {
        theirs or ours: ours if theirs else f"{_UNUSED}{ours}" for ours, theirs in columns.items()
    }


def _renamed(
    columns: Sequence[str], rename: Mapping[str, str], used: Collection[str], where: str
) -> dict[str, str]:
    """Our name of each column: the user's name."""
    for name, count in Counter(columns).items():
        if count > 1:
            raise UsageError(f"{where} has {count} columns named {name!r}. Keep one of them.")
    for name in rename:
        if name not in columns:
            raise UsageError(
                f"{where} has no column {name!r} to rename; it has {listed(columns)}."
                f"{did_you_mean(closest(name, columns))} Change --map."
            )
    found: dict[str, str] = {}
    for column in columns:
        name = rename.get(column, ALIASES.get(column, column))
        if name in found and name in used:
            raise UsageError(
                f"{where}: the columns {found[name]!r} and {column!r} would both be {name!r}. "
                f"Take one out, for example with --map {column}=."
            )
        found[name] = column
    return found


def _require_carry(found: Mapping[str, str], carry: Sequence[str], where: str) -> None:
    for name in carry:
        if name in RESERVED:
            raise UsageError(
                f"{where}: a column named {name!r} cannot be carried, because shards have one of "
                f"their own. Rename yours, for example with --map my_{name}={name}."
            )
        if name not in found:
            raise UsageError(
                f"{where} has no column {name!r} to carry; it has {listed(found)}."
                f"{did_you_mean(closest(name, found))} Change data.carry."
            )


def _require_no_other_prompt(found: Mapping[str, str], where: str) -> None:
    """Refuses a data set whose prompt column may have another name."""
    for name in PROMPT_LIKE:
        if name in found:
            raise UsageError(
                f"{where} has no column 'prompt' but one named {name!r}. Pass --map prompt={name} "
                f"if that is the prompt, or --map {name}= if chosen and rejected begin with theirs."
            )


def _declared(found: Mapping[str, str], where: str) -> DataShape:
    fitting = [one for one in _OURS if set(one.columns) <= set(found)]
    if not fitting:
        _require_not_foreign(found, where)
        raise UsageError(no_shape(_OURS, found, _KNOWN, where))
    if len(fitting) > 1:
        raise UsageError(several_shapes(fitting, found, where))
    return fitting[0]


def _require_not_foreign(found: Mapping[str, str], where: str) -> None:
    for one in DATA_SHAPES:
        if one.is_foreign and set(one.columns) <= set(found) and "label" not in found:
            way = "judge" if one.is_single else "select"
            raise UsageError(
                f"{where} has rows as {one.name} has them ({listed(one.columns)}): first "
                f"`align {way} {where}`, whose output is read here."
            )
