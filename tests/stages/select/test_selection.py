"""What select chooses: worked by hand, then against a slow oracle over drawn samples."""

import json
import math
from itertools import combinations, permutations
from statistics import fmean, median

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.round_options import SelectOptions
from align.schemas.rows import Role, offsets_of
from align.stages.feed.conversions import Own, ScoreRules, labels_of_scores, pairs
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
    table = pl.DataFrame(
        rows,
        schema={
            "prompt": pl.String,
            "prompt_key": pl.String,
            "text": pl.String,
            "score": pl.Float64,
            "length": pl.Int64,
            "is_cut": pl.Boolean,
        },
        orient="row",
    )
    return table.with_columns(completion=pl.col("text"))


def scored(**scores):
    """Samples of one prompt: their texts and scores."""
    return [{"text": text, "score": score} for text, score in scores.items()]


def selected(table, **options):
    found = select_rows(table, SelectOptions(**options))
    return found.table.rows(), {name: count for name, count in found.counts.items() if count}


def test_the_best_is_chosen_over_the_worst_of_each_prompt():
    table = samples(scored(a=0.5, b=0.9, c=0.1), scored(d=1, e=2))
    rows, counts = selected(table)
    assert rows == [("p0", "b", "c", 0.9, 0.1), ("p1", "e", "d", 2, 1)]
    assert counts == {"prompts": 2, "samples": 5, "rows": 2}


def test_of_equal_scores_the_first_is_the_better_and_the_last_the_worse():
    rows, _ = selected(samples(scored(a=1, b=0, c=1, d=0)))
    assert rows == [("p0", "a", "d", 1, 0)]


def test_a_tie_is_no_pair():
    table = samples(scored(a=1, b=1), scored(c=1, d=0))
    rows, counts = selected(table)
    assert [row[1:3] for row in rows] == [("c", "d")]
    assert counts["too_near"] == 1


@pytest.mark.parametrize(("gap", "kept"), [(0.0, 1), (0.09, 1), (0.1, 0)])
def test_scores_are_further_apart_than_the_gap_as_decimals(gap, kept):
    assert 0.8 - 0.7 > 0.1  # as binary numbers
    table = samples(scored(a=0.8, b=0.7), scored(c=1, d=0))
    assert len(selected(table, min_gap=gap)[0]) == kept + 1


def test_all_pairs_are_every_better_one_over_every_worse_one():
    rows, counts = selected(samples(scored(a=1, b=3, c=2, d=1)), rows="all_pairs")
    pairs = [row[1:3] for row in rows]
    assert pairs == [("b", "c"), ("b", "a"), ("b", "d"), ("c", "a"), ("c", "d")]
    assert counts["too_near"] == 1  # a and d


def test_the_widest_gap_among_samples_of_like_length_is_taken():
    lengths = {"a": 40, "b": 11, "c": 10, "d": 21}
    prompt = [{**one, "length": lengths[one["text"]]} for one in scored(a=0.9, b=0.5, c=0.4, d=0.1)]
    # a/d: 40/21; a/b and a/c: more; b/d: 21/11; c/d: 2.1
    assert [row[1:3] for row in selected(samples(prompt), max_length_ratio=2)[0]] == [("a", "d")]
    assert [row[1:3] for row in selected(samples(prompt), max_length_ratio=1.5)[0]] == [("b", "c")]
    prompt[0]["length"] = 43
    assert [row[1:3] for row in selected(samples(prompt), max_length_ratio=2)[0]] == [("b", "d")]
    table = samples(prompt, scored(e=1, f=0))
    rows, counts = selected(table, max_length_ratio=1)
    assert [row[1:3] for row in rows] == [("e", "f")]
    assert counts["too_unlike"] == 1


TENTHS_OF = {"b": 0.3, "a": 0.4, "c": 0.2, "d": 0.1}


def test_of_equal_gaps_that_of_the_better_chosen_is_taken():
    assert 0.3 - 0.1 != 0.4 - 0.2  # as binary numbers
    lengths = {"a": 1, "b": 10, "c": 1, "d": 10}
    for kind in (np.float64, np.float32):
        scores = {name: float(kind(score)) for name, score in TENTHS_OF.items()}
        prompt = [{**one, "length": lengths[one["text"]]} for one in scored(**scores)]
        rows, _ = selected(samples(prompt), max_length_ratio=2)
        assert [row[1:3] for row in rows] == [("a", "c")]


def test_labels_are_above_and_below_the_mean_of_their_prompt():
    table = samples(scored(a=0.1, b=0.2, c=0.3), scored(d=5, e=1))
    rows, counts = selected(table, rows="labels")
    assert rows == [("p0", "a", False), ("p0", "c", True), ("p1", "d", True), ("p1", "e", False)]
    assert counts["at_threshold"] == 1  # b, though 0.2 is not the mean as a binary number


def test_labels_may_have_the_median_or_a_number_as_threshold():
    table = samples(scored(a=0, b=1, c=10, d=11, e=100))
    by_median, _ = selected(table, rows="labels", threshold="median")
    assert by_median == [
        ("p0", "a", False),
        ("p0", "b", False),
        ("p0", "d", True),
        ("p0", "e", True),
    ]
    by_number, counts = selected(table, rows="labels", threshold=1.0)
    assert [row[2] for row in by_number] == [False, True, True, True]
    assert counts["at_threshold"] == 1


def test_a_lone_sample_is_a_label_against_a_number_and_nothing_against_its_own_mean():
    table = samples(scored(a=2))
    assert selected(table, rows="labels", threshold=1.0)[0] == [("p0", "a", True)]
    assert selected(table, rows="labels")[0] == []


def test_a_group_is_all_samples_with_their_scores():
    table = samples(scored(a=1, b=0), scored(c=2))
    rows, _ = selected(table, rows="groups")
    assert rows == [("p0", ["a", "b"], [1, 0]), ("p1", ["c"], [2])]


def test_groups_keep_equal_texts_because_their_number_is_a_part_of_the_mean():
    same = [{"text": "a", "score": 1}, {"text": "a", "score": 1}, {"text": "b", "score": 0}]
    assert selected(samples(same), rows="groups")[0] == [("p0", ["a", "a", "b"], [1, 1, 0])]


def test_of_equal_texts_the_first_stays_with_the_mean_of_their_scores():
    same = [{"text": "a", "score": score} for score in (1, 0)] + scored(b=0.25)
    rows, counts = selected(samples(same))
    assert rows == [("p0", "a", "b", 0.5, 0.25)]
    assert counts["duplicates"] == 1


def test_equal_scores_of_equal_texts_stay_as_they_are():
    assert fmean([0.1] * 3) != 0.1  # as binary numbers
    same = [{"text": "a", "score": 0.1}] * 3 + scored(b=0.0)
    assert selected(samples(same))[0] == [("p0", "a", "b", 0.1, 0.0)]


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_a_mean_that_is_another_score_on_paper_is_equal_to_it(kind):
    other, least = scored(b=float(kind(0.2))), scored(c=0.0)
    for scores in permutations([0.1, 0.2, 0.3]):
        assert fmean(scores) != 0.2  # as binary numbers
        twice = [{"text": "a", "score": float(kind(score))} for score in scores]
        assert selected(samples([*twice, *other, *least]))[0] == [("p0", "a", "c", 0.2, 0.0)]
        assert selected(samples([*other, *twice, *least]))[0][0][1] == "b"
        labels, _ = selected(samples([*twice, *least]), rows="labels", threshold=0.2)
        assert labels == [("p0", "c", False)]


def test_scores_that_are_equal_on_paper_are_ranked_by_their_numbers():
    assert 0.1 + 0.2 > 0.3  # as binary numbers
    assert selected(samples(scored(a=0.3, b=0.1 + 0.2, c=0.0)))[0][0][1:3] == ("a", "c")
    assert selected(samples(scored(a=1.0, b=0.3, c=0.1 + 0.2)))[0][0][1:3] == ("a", "c")


def test_a_length_ratio_is_meant_as_the_decimal_that_it_is():
    assert 1.15 * 100 < 115  # as binary numbers
    prompt = scored(a=1, b=0)
    prompt[0]["length"], prompt[1]["length"] = 115, 100
    assert len(selected(samples(prompt), max_length_ratio=1.15)[0]) == 1
    prompt[0]["length"] = 116
    assert selected(samples(prompt), max_length_ratio=1.15)[0] == []


def test_a_text_of_another_prompt_is_no_duplicate():
    rows, counts = selected(samples(scored(a=1, b=0), scored(a=1, b=0)))
    assert len(rows) == 2
    assert "duplicates" not in counts


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf])
def test_samples_without_a_score_are_left_out(score):
    table = samples(scored(a=score, b=1, c=0), scored(d=1, e=score))
    rows, counts = selected(table)
    assert rows == [("p0", "b", "c", 1, 0)]
    assert counts == {"prompts": 2, "samples": 5, "no_score": 2, "too_few": 1, "rows": 1}


def test_cut_samples_are_left_out_unless_they_are_asked_for():
    prompt = scored(a=2, b=1, c=0)
    prompt[0]["is_cut"] = True
    rows, counts = selected(samples(prompt))
    assert rows == [("p0", "b", "c", 1, 0)]
    assert counts["cut"] == 1
    assert selected(samples(prompt), keep_cut=True)[0] == [("p0", "a", "c", 2, 0)]


def test_a_cut_sample_does_not_stand_for_a_whole_one_of_the_same_text():
    prompt = [{"text": "a", "score": 1, "is_cut": True}, *scored(a=1, b=0)]
    rows, counts = selected(samples(prompt))
    assert rows == [("p0", "a", "b", 1, 0)]
    assert "duplicates" not in counts


def test_samples_whose_text_cannot_be_used_are_left_out():
    rows, counts = selected(samples([{"text": None, "score": 9}, *scored(a=1, b=0)]))
    assert rows == [("p0", "a", "b", 1, 0)]
    assert counts["no_text"] == 1


def test_a_prompt_of_which_nothing_is_left_is_counted():
    table = samples(scored(a=None), scored(b=1, c=0))
    for rows in KINDS:
        assert selected(table, rows=rows)[1]["too_few"] == 1
        assert selected(table[:1], rows=rows)[0] == []


@pytest.mark.parametrize("rows", KINDS)
def test_rows_are_in_the_order_of_the_prompts_and_in_one_piece(rows):
    whole = samples(*(scored(a=1, b=0, c=2) for _ in range(50)))
    pieces = pl.concat([whole[:7], whole[7:]], rechunk=False)
    assert pieces.n_chunks() == 2
    found = select_rows(pieces, SelectOptions(rows=rows)).table
    assert found.n_chunks("all") == [1] * found.width
    assert found.equals(select_rows(whole, SelectOptions(rows=rows)).table)
    prompts = found["prompt"].to_list()
    assert prompts == sorted(prompts, key=lambda name: int(name[1:]))


@pytest.mark.parametrize("rows", KINDS)
def test_what_the_chat_template_is_given_stays_with_the_rows(rows):
    table = samples(scored(a=1, b=0)).with_columns(tools=pl.lit("[…]"), answer=pl.lit("9"))
    found = select_rows(table, SelectOptions(rows=rows)).table
    assert found["tools"].to_list() == ["[…]"] * found.height
    assert "answer" not in found.columns


def test_pairs_of_many_prompts_are_looked_at_in_parts(monkeypatch):
    table = samples(*(scored(a=at, b=-at, c=0.5) for at in range(1, 40)))
    whole = select_rows(table, SelectOptions(rows="all_pairs"))
    for most in (1, 9, 100):
        monkeypatch.setattr(selection, "MOST_PAIRS", most)
        parts = select_rows(table, SelectOptions(rows="all_pairs"))
        assert parts.table.equals(whole.table)
        assert parts.counts == whole.counts


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


@given(st.lists(st.lists(DRAWN, min_size=1, max_size=7), min_size=1, max_size=5), OPTIONS)
def test_the_rows_are_those_of_the_slow_way(prompts, options):
    found = select_rows(samples(*prompts), options)
    expected = [
        row for at, prompt in enumerate(prompts) for row in slowly(f"p{at}", prompt, options)
    ]
    assert rounded(found.table.rows()) == rounded(expected)
    require_all_counted(found.counts, options.rows)


SCORES = st.one_of(TENTHS, st.floats(-9, 9, width=32), st.floats(-9, 9))


@given(
    st.lists(st.lists(SCORES, min_size=1, max_size=6), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from(["mean", "median", 0.1]),
)
def test_rows_are_those_that_training_makes_of_groups(prompts, gap, threshold):
    table = samples(*(scored(**dict(zip("abcdef", scores, strict=False))) for scores in prompts))
    scores, sizes = [score for prompt in prompts for score in prompt], [*map(len, prompts)]
    places = np.arange(len(scores))
    own = Own(
        np.arange(len(sizes)),
        offsets_of(sizes),
        places,
        np.zeros(len(places), np.int8),
        np.array(scores),
    )
    for rows, way in (("best_worst", "best_worst"), ("all_pairs", "all")):
        trained = pairs(own, ScoreRules(way, min_gap=gap)).scores.reshape(-1, 2)
        found = select_rows(table, SelectOptions(rows=rows, min_gap=gap)).table
        assert found.select("chosen_score", "rejected_score").rows() == [*map(tuple, trained)]
    trained = labels_of_scores(own, ScoreRules(threshold=threshold))
    found = select_rows(table, SelectOptions(rows="labels", threshold=threshold)).table
    assert found["label"].to_list() == [role == Role.DESIRABLE for role in trained.roles]


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
    of_samples = sum(counts[name] for name in ("no_score", "no_text", "cut", "duplicates"))
    if kind == "best_worst":
        reasons = ("rows", "too_few", "too_near", "too_unlike")
        assert counts["prompts"] == sum(counts[name] for name in reasons)
    elif kind == "labels":
        assert counts["samples"] == counts["rows"] + of_samples + counts["at_threshold"]
    elif kind == "groups":
        assert counts["prompts"] == counts["rows"] + counts["too_few"]
    json.dumps(counts)  # plain numbers, which the manifest can hold
