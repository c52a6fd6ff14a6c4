"""One stored row at a time: what each kind of method reads of it, in plain Python."""

from itertools import combinations
from statistics import mean, median

from align.schemas.rows import Role

C, R, D, U, X, M = Role
GOOD = {C, D}
LABELS = {C: D, R: U}


def read_slowly(own, kind, rules):
    """Rows made of one with these (role, score) completions: lists of (place, role, score).

    A score is None where the data gives none.
    """
    completions = [(place, role, score) for place, (role, score) in enumerate(own)]
    roles = {role for _, role, _ in completions}
    if roles == {C, R}:
        completions.sort(key=lambda completion: completion[1])
    if kind == "grouped":
        return [_group(completions)]
    if roles == {X}:
        return _of_scores(completions, kind, rules) if None not in _scores(completions) else []
    if kind == "paired":
        return [completions] if roles == {C, R} else []
    labelled = [(place, LABELS.get(role, role), score) for place, role, score in completions]
    if kind == "labelled":
        return [labelled]
    good = [completion for completion in labelled if completion[1] == D]
    return [good] if good else []


def _group(completions):
    scores = _scores(completions)
    if None in scores and completions[0][1] != X:
        scores = [float(role in GOOD) for _, role, _ in completions]
    return [(place, X, score) for (place, _, _), score in zip(completions, scores, strict=True)]


def _of_scores(completions, kind, rules):
    best_first = sorted(completions, key=lambda completion: -completion[2])
    if kind == "imitated":
        place, _, score = best_first[0]
        return [[(place, D, score)]]
    if kind == "labelled":
        limit = {"mean": mean, "median": median}.get(rules.threshold, lambda _: rules.threshold)
        limit = limit(_scores(completions))
        made = [
            (place, D if score > limit else U, score)
            for place, _, score in completions
            if score != limit
        ]
        return [made] if made else []
    pairs = list(combinations(best_first, 2))
    if rules.pairs == "best_worst":
        pairs = [(best_first[0], best_first[-1])]
    return [
        [(better[0], C, better[2]), (worse[0], R, worse[2])]
        for better, worse in pairs
        if better[2] - worse[2] > rules.min_gap
    ]


def _scores(completions):
    return [score for _, _, score in completions]
