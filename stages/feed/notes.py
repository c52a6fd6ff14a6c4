"""What a person should know of how a cache is read: what becomes what, and what is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .conversions import CONVERSIONS, StoredKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ...schemas.methods import RowKind
    from .reading import Reading
    from .selection import KindCounts

WANTED: dict[RowKind, str] = {
    "paired": "rows with one chosen and one rejected completion, or scored ones",
    "labelled": "completions with a label, pairs of them, or scored ones",
    "grouped": "groups of scored completions, or pairs and labels as such",
    "imitated": "completions that are chosen, desirable or the best of theirs",
}
STORED = {
    StoredKind.PAIRED: "paired (chosen, rejected)",
    StoredKind.UNPAIRED: "unpaired (a completion and its label)",
    StoredKind.SCORED: "scored (completions and their scores)",
}


def told(kinds: Mapping[StoredKind, KindCounts], reading: Reading) -> Iterator[str]:
    """A sentence for everything that is not simply read as it is stored."""
    total = sum(counts.stored for counts in kinds.values())
    for kind, counts in sorted(kinds.items()):
        if kind in CONVERSIONS[reading.kind]:
            yield from _converted(kind, counts, reading)
        else:
            yield (
                f"{counts.stored:,} of {total:,} rows are not read: they are {STORED[kind]}, "
                f"and the method reads {WANTED[reading.kind]}."
            )


def _converted(kind: StoredKind, counts: KindCounts, reading: Reading) -> Iterator[str]:
    name = kind.name.lower()
    if counts.read and (become := _become(kind, counts, reading)):
        yield f"{counts.read:,} {name} rows are read as {become}."
    assumes = reading.kind == "grouped" and kind != StoredKind.SCORED
    if counts.unscored and assumes:
        yield (
            f"{counts.unscored:,} {name} rows lack scores of their own: chosen and desirable "
            f"completions get 1, others {reading.rules.bad_score:g}."
        )
    judged = kind == StoredKind.SCORED and reading.kind != "grouped"
    if unscored := counts.unscored if judged else 0:
        yield (
            f"{unscored:,} of {counts.stored:,} {name} rows are left out: a completion of each "
            "has no score. `align score` gives them some."
        )
    if dropped := counts.stored - counts.read - unscored:
        why = _why(kind, reading)
        yield f"{dropped:,} of {counts.stored:,} {name} rows are left out: {why}."
    if counts.left_out and (reading.kind, kind) == ("labelled", StoredKind.SCORED):
        yield (
            f"{counts.left_out:,} completions of scored rows get no label: their score is "
            f"{_threshold(reading)} itself (train.label_threshold)."
        )


def _become(kind: StoredKind, counts: KindCounts, reading: Reading) -> str:
    """What rows of a kind are read as; empty where that is what they are."""
    rules = reading.rules
    which = {
        "best_worst": "the best against the worst",
        "all": f"all that are more than {rules.min_gap:g} apart",
    }[rules.pairs]
    ways: dict[tuple[RowKind, StoredKind], str] = {
        ("paired", StoredKind.SCORED): f"{counts.made:,} pairs: {which} (train.pairs_from_scores)",
        ("labelled", StoredKind.PAIRED): "labels: chosen is desirable, rejected undesirable",
        ("labelled", StoredKind.SCORED): f"labels: desirable above {_threshold(reading)}, "
        "undesirable below it (train.label_threshold)",
        ("grouped", StoredKind.PAIRED): "groups of two scored completions",
        ("grouped", StoredKind.UNPAIRED): "groups of as many scored completions as they hold",
        ("imitated", StoredKind.PAIRED): "what to imitate: the chosen completion of each",
        ("imitated", StoredKind.UNPAIRED): "what to imitate: their desirable completions",
        ("imitated", StoredKind.SCORED): "what to imitate: the best completion of each",
    }
    return ways.get((reading.kind, kind), "")


def _why(kind: StoredKind, reading: Reading) -> str:
    if kind == StoredKind.UNPAIRED:
        return "nothing in them is desirable"
    if reading.kind == "labelled":
        return f"no score of theirs is above or below {_threshold(reading)}"
    gap = f"more than {reading.rules.min_gap:g} apart (train.min_score_gap)"
    return f"no two scores of theirs are {gap}"


def _threshold(reading: Reading) -> str:
    threshold = reading.rules.threshold
    return f"the {threshold} of its row" if isinstance(threshold, str) else f"{threshold:g}"
