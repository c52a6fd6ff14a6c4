"""One row per completion becomes one row per prompt, wherever the rows stood."""

from collections import Counter, defaultdict

import pytest
from encoded_rows import all_rows, encoded, make_ring, token_lists
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.schemas.rows import Role
from align.stages.prepare import ring as module


@pytest.fixture
def folder(tmp_path_factory):
    """A new one for every example."""
    return lambda: tmp_path_factory.mktemp("long")


def long_row(prompt, completion, score, *, weight=1.0, row=0):
    return encoded(
        prompt,
        completion,
        roles=(Role.CANDIDATE,),
        scores=(score,),
        carried={"weight": weight},
        row=row,
    )


@st.composite
def long_rows(draw):
    pool = draw(st.lists(token_lists(most=3), min_size=1, max_size=6))
    row = st.tuples(st.sampled_from(pool), token_lists(), st.sampled_from([0.0, 0.5, 1.0]))
    weights = st.sampled_from([1.0, 2.0])
    return [
        long_row(*each, weight=draw(weights), row=index)
        for index, each in enumerate(draw(st.lists(row, min_size=1, max_size=25)))
    ]


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(long_rows(), st.randoms(), st.integers(1, 6), st.sampled_from([1, 60, 10**6]))
def test_rows_of_one_prompt_become_one_in_any_order(folder, records, shuffler, chunk, tokens):
    ring, intake = make_ring(folder(), records, long_form=True, carried=("weight",))
    rows = all_rows(ring)
    by_hand = defaultdict(Counter)
    for each in records:
        by_hand[tuple(each.prompt)][tuple(each.completions[0]), each.record.scores[0]] += 1
    found = {row.prompt: Counter((ids, score) for ids, _, score, _ in row.branches) for row in rows}
    assert found == by_hand
    assert len(rows) == len(by_hand)
    assert all(role == Role.CANDIDATE for row in rows for _, role, _, _ in row.branches)
    assert intake.notes["rows_joined_by_prompt"] == len(records) - len(rows)

    shuffled = records[:]
    shuffler.shuffle(shuffled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS_PER_RUN", tokens)
        patch.setattr(module, "TOKENS_PER_MERGE", tokens)
        again, _ = make_ring(folder(), shuffled, chunk=chunk, long_form=True, carried=("weight",))
    assert [row._replace(source=None) for row in all_rows(again)] == [
        row._replace(source=None) for row in rows
    ]


def test_a_joined_row_comes_from_one_of_its_rows(tmp_path):
    records = [long_row([1], [completion], 0.5, row=completion) for completion in range(5)]
    (row,) = all_rows(make_ring(tmp_path, records, long_form=True, carried=("weight",))[0])
    first = row.branches[0][0]
    assert (row.source[1],) == first


def test_a_row_alone_gets_an_id_of_its_content_too(tmp_path):
    ids = [
        all_rows(make_ring(tmp_path / str(place), [long_row([1], [2], score)], long_form=True)[0])[
            0
        ].row_id
        for place, score in enumerate((0.5, 1.0, 0.5))
    ]
    assert ids[0] != ids[1]
    assert ids[0] == ids[2]


def test_an_id_of_a_joined_row_depends_on_each_of_its_rows(tmp_path):
    def joined(name, *completions):
        records = [long_row([1], ids, 0.5) for ids in completions]
        (row,) = all_rows(make_ring(tmp_path / name, records, long_form=True)[0])
        return row.row_id

    ids = {joined(str(last), [2], [3], [last]) for last in range(4, 12)}
    assert len(ids) == 8
    assert joined("two", [2], [3]) not in ids


def test_weights_that_differ_within_a_prompt_are_noted(tmp_path):
    records = [long_row([1], [2], 0.5), long_row([1], [3], 0.5, weight=2.0), long_row([4], [2], 1)]
    _, intake = make_ring(tmp_path, records, long_form=True, carried=("weight",))
    assert intake.notes["prompts_with_more_than_one_weight"] == 1
