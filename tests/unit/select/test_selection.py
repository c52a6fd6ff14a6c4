"""What select chooses: worked by hand, then against a slow oracle over drawn samples."""

import json
import math
from itertools import combinations
from statistics import fmean, median
from unittest import mock

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.round_options import SelectOptions
from align.stages.sample.sample_table import text_column
from align.stages.select import selection
from align.stages.select.selection import select_rows

KINDS = ("best_worst", "all_pairs", "labels", "groups")
SAMPLE = {"text": "a", "score": 0.0, "length": 1, "is_cut": False}


def samples(*prompts):
    """A table of samples; each prompt is a list of what its samples have."""
    rows = [
        {**SAMPLE, **sample, "prompt": f"p{at}", "prompt_key": f"k{at}"}
        for at, prompt in enumerate(prompts)
        for sample in prompt
    ]
    texts = dict.fromkeys(("prompt", "prompt_key", "text"), pl.String)
    kinds = {**texts, "score": pl.Float64, "length": pl.Int64, "is_cut": pl.Boolean}
    table = pl.DataFrame(rows, schema=kinds, orient="row")
    return table.with_columns(completion=pl.col("text"))


def scored(**scores):
    """Samples of one prompt: their texts and scores."""
    return [{"text": text, "score": score} for text, score in scores.items()]


def selected(*prompts, **options):
    """The rows of these prompts, and the counts that are not 0."""
    table, counts = select_rows(samples(*prompts), SelectOptions(**options))
    return table.rows(), {name: count for name, count in counts.items() if count}


def pairs_of(*prompts, **options):
    """The chosen and the rejected text of each pair."""
    return [row[1:3] for row in selected(*prompts, **options)[0]]


TWICE = [{"text": "a", "score": score} for score in (1, 0)] + scored(b=0.25)
# Prompts, options and rows; what else there is, the slow way below says.
BY_HAND = [
    # Of equal scores the first is the better and the last the worse.
    ([scored(a=1, b=0, c=1, d=0)], {}, [("p0", "a", "d", 1, 0)]),
    # Of equal texts the first stays, with the mean.
    ([TWICE], {}, [("p0", "a", "b", 0.5, 0.25)]),
    # How often a policy says a thing is a part of the mean of its group.
    ([TWICE], {"rows": "groups"}, [("p0", ["a", "a", "b"], [1, 0, 0.25])]),
    # 0.2 is not the mean as a binary number.
    ([scored(a=0.1, b=0.2, c=0.3)], {"rows": "labels"}, [("p0", "a", False), ("p0", "c", True)]),
    # The mean is that of a prompt, not of all of them.
    (
        [scored(a=9, b=8), scored(c=2, d=1)],
        {"rows": "labels"},
        [("p0", "a", True), ("p0", "b", False), ("p1", "c", True), ("p1", "d", False)],
    ),
]


@pytest.mark.parametrize(("prompts", "options", "rows"), BY_HAND)
def test_rows_are_those_chosen_by_hand(prompts, options, rows):
    assert selected(*prompts, **options)[0] == rows


def single(score):
    """What float32 keeps of a score."""
    return pl.Series([score], dtype=pl.Float32).cast(pl.Float64)[0]


@pytest.mark.parametrize("stored", [float, single])
def test_scores_gaps_ratios_and_means_are_compared_up_to_rounding(stored):
    def pairs(lengths=(1, 1, 1), *, scores, **options):
        prompt = [
            {"text": text, "score": stored(score), "length": length}
            for text, score, length in zip("abc", scores, lengths, strict=False)
        ]
        return pairs_of(prompt, **options)

    assert 0.1 + 0.2 > 0.3  # as binary numbers, as below
    assert pairs(scores=(0.3, 0.1 + 0.2, 0.0)) == [("a", "c")]
    assert pairs(scores=(1.0, 0.3, 0.1 + 0.2)) == [("a", "c")]
    assert pairs(scores=(1.0, 1.00001)) == [("b", "a")]
    assert 0.8 - 0.7 > 0.1
    assert [len(pairs(scores=(0.8, 0.7), min_gap=gap)) for gap in (0.09, 0.1)] == [1, 0]
    # Of gaps that are equal on paper, the best chosen one.
    lengths = {"lengths": (1, 9, 1), "max_length_ratio": 1.0}
    assert pairs(scores=(0.4, 0.3, 0.2), **lengths) == [("a", "c")]
    assert 1.15 * 100 < 115
    for length, kept in ((115, 1), (116, 0)):
        assert len(pairs((length, 100), scores=(1, 0), max_length_ratio=1.15)) == kept
    # The mean of equal texts is 0.2 on paper.
    assert fmean([0.1, 0.2, 0.3]) != 0.2
    twice = [{"text": "a", "score": stored(score)} for score in (0.1, 0.2, 0.3)]
    other, least = scored(b=stored(0.2)), scored(c=0.0)
    assert pairs_of([*twice, *other, *least]) == [("a", "c")]
    assert pairs_of([*other, *twice, *least]) == [("b", "c")]
    labels, _ = selected([*twice, *least], rows="labels", threshold=0.2)
    assert labels == [("p0", "c", False)]


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf, 1.7e308, -1e301])
def test_samples_without_a_score_or_a_text_are_left_out_and_counted(score):
    none = {"text": None, "score": 9}
    rows, counts = selected([none, *scored(a=score, b=1, c=0)], scored(d=1, e=score))
    assert rows == [("p0", "b", "c", 1, 0)]
    left = {"no_score": 2, "no_text": 1, "too_few": 1}
    assert counts == {"prompts": 2, "samples": 6, **left, "rows": 1}
    for kind in KINDS:
        assert selected(scored(a=score), scored(b=1, c=0), rows=kind)[1]["too_few"] == 1
        assert selected(scored(a=score), rows=kind)[0] == []


@pytest.mark.parametrize("rows", KINDS)
def test_rows_are_in_the_order_of_the_prompts_in_one_piece_and_keep_their_tools(rows):
    whole = samples(*(scored(a=1, b=0, c=2) for _ in range(50)))
    whole = whole.with_columns(tools=pl.lit("[…]"), answer=pl.lit("9"))
    pieces = pl.concat([whole[:7], whole[7:]], rechunk=False)
    assert pieces.n_chunks() == 2
    found, _ = select_rows(pieces, SelectOptions(rows=rows))
    assert found.n_chunks("all") == [1] * found.width
    assert found.equals(select_rows(whole, SelectOptions(rows=rows))[0])
    prompts = found["prompt"].to_list()
    assert prompts == sorted(prompts, key=lambda name: int(name[1:]))
    assert found["tools"].to_list() == ["[…]"] * found.height
    assert "answer" not in found.columns


TENTHS = st.integers(-9, 9).map(lambda tenths: tenths / 10)
DRAWN = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["a", "b", "c", "d", "e", "f", None]),
        "score": st.none() | TENTHS,
        "length": st.integers(1, 6),
        "is_cut": st.sampled_from([False, False, False, True]),
    }
)
OPTIONS = st.builds(
    SelectOptions,
    rows=st.sampled_from(KINDS),
    threshold=st.sampled_from(["mean", "median"]) | TENTHS,
    min_gap=st.integers(0, 9).map(lambda tenths: tenths / 10),
    max_length_ratio=st.sampled_from([0.0, 1.0, 1.5, 2.0, 9.0]),
    keep_cut=st.booleans(),
)


@given(
    st.lists(st.lists(DRAWN, min_size=1, max_size=7), min_size=1, max_size=5),
    OPTIONS,
    st.sampled_from([1, 9, selection.MOST_PAIRS]),  # that are looked at together
)
def test_the_rows_are_those_of_the_slow_way(prompts, options, most):
    with mock.patch.object(selection, "MOST_PAIRS", most):
        table, counts = select_rows(samples(*prompts), options)
    expected = [
        row for at, prompt in enumerate(prompts) for row in slowly(f"p{at}", prompt, options)
    ]
    assert rounded(table.rows()) == rounded(expected)
    require_all_counted(counts, options.rows)


def rounded(rows):
    """Without the rounding of means."""
    return [
        tuple(round(cell, 9) if isinstance(cell, float) else cell for cell in row) for row in rows
    ]


def slowly(name, prompt, options):
    """The rows of one prompt, one comparison after the other; scores in whole tenths."""
    kept = [one for one in prompt if one["score"] is not None and one["text"] is not None]
    kept = [one for one in kept if options.keep_cut or not one["is_cut"]]
    if options.rows == "groups":
        texts, scores = [one["text"] for one in kept], [one["score"] for one in kept]
        return [(name, texts, scores)] if kept else []
    kept = without_duplicates(kept)
    if options.rows == "labels":
        return slow_labels(name, kept, options.threshold)
    # Better first; of equal scores the earlier one.
    kept.sort(key=lambda one: -one["score"])
    found = [pair for pair in combinations(kept, 2) if makes_a_pair(*pair, options)]
    if options.rows == "best_worst" and found:
        places = [(kept.index(better), kept.index(worse)) for better, worse in found]
        gaps = [round(better["score"] - worse["score"], 9) for better, worse in found]
        best = max(range(len(found)), key=lambda at: (gaps[at], -places[at][0], places[at][1]))
        found = [found[best]]
    return [(name, b["text"], w["text"], b["score"], w["score"]) for b, w in found]


def without_duplicates(kept):
    of_text = {}
    for one in kept:
        of_text.setdefault(one["text"], []).append(one)
    return [{**same[0], "score": fmean(one["score"] for one in same)} for same in of_text.values()]


def makes_a_pair(better, worse, options):
    longer, shorter = max(better["length"], worse["length"]), min(better["length"], worse["length"])
    is_alike = not options.max_length_ratio or longer <= options.max_length_ratio * shorter
    return is_alike and better["score"] - worse["score"] > options.min_gap + 1e-9


def slow_labels(name, kept, threshold):
    if not kept:
        return []
    scores = [one["score"] for one in kept]
    limit = {"mean": fmean, "median": median}.get(threshold, lambda _: threshold)(scores)
    return [
        (name, one["text"], one["score"] > limit)
        for one in kept
        if abs(one["score"] - limit) > 1e-9
    ]


def require_all_counted(counts, kind):
    """Every sample or prompt is either in a row or left out for one reason."""
    of_samples = ("no_score", "no_text", "cut", "duplicates", "at_threshold")
    whole, reasons = {
        "best_worst": ("prompts", ("too_few", "too_near", "too_unlike")),
        "labels": ("samples", of_samples),
        "groups": ("prompts", ("too_few",)),
    }.get(kind, ("rows", ()))
    assert counts[whole] == counts["rows"] + sum(counts[name] for name in reasons)
    json.dumps(counts)  # plain numbers, which the manifest can hold


def test_what_messages_have_beside_their_text_is_kept():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    turns = [[call], [{"role": "assistant", "content": "yes"}]]
    assert [json.loads(cell) for cell in text_column(turns)] == turns
    assert text_column(turns[1:]).to_list() == turns[1:]
