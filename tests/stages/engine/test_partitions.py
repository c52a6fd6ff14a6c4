"""Where values lie under each ZeRO stage, worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.stages.engine.partitions import (
    Partition,
    RankSpread,
    ScatteredValues,
    Stretch,
    split_each,
    split_together,
)

SIZES = {"a": 5, "b": 1, "c": 4}


def test_zero_1_and_2_cut_all_parameters_as_one():
    # aaaaabcccc are ten values; two ranks hold twelve, a multiple of four: six each.
    assert split_together(SIZES, [0, 0, 0], 0, ranks=2) == Partition(
        6, (Stretch("a", 0, 5, 0), Stretch("b", 0, 1, 5))
    )
    assert split_together(SIZES, [0, 0, 0], 1, ranks=2) == Partition(6, (Stretch("c", 0, 4, 0),))
    # Three ranks hold twelve as well: four each, aaaa | abcc | cc and two of padding.
    assert [split_together(SIZES, [0, 0, 0], rank, ranks=3).stretches for rank in range(3)] == [
        (Stretch("a", 0, 4, 0),),
        (Stretch("a", 4, 1, 0), Stretch("b", 0, 1, 1), Stretch("c", 0, 2, 2)),
        (Stretch("c", 2, 2, 0),),
    ]


def test_zero_1_and_2_may_pad_behind_each_parameter():
    # aaaaa... b... cccc are sixteen places; two ranks hold eight each.
    first, second = (split_together(SIZES, [3, 3, 0], rank, ranks=2) for rank in range(2))
    assert first == Partition(8, (Stretch("a", 0, 5, 0),))
    assert second == Partition(8, (Stretch("b", 0, 1, 0), Stretch("c", 0, 4, 4)))


def test_zero_3_cuts_each_parameter_by_itself():
    # Of two ranks each holds three of a, one of b and two of c; the last of a and b are padding.
    first, second = (split_each(SIZES, rank, ranks=2) for rank in range(2))
    assert first == Partition(
        6, (Stretch("a", 0, 3, 0), Stretch("b", 0, 1, 3), Stretch("c", 0, 2, 4))
    )
    assert second == Partition(6, (Stretch("a", 3, 2, 0), Stretch("c", 2, 2, 4)))
    assert first.used == second.used == 6


def test_parameters_of_fewer_values_than_ranks_leave_ranks_with_padding_alone():
    one = {"bias": 1}
    assert [split_together(one, [0], rank, ranks=4).stretches for rank in range(4)] == [
        (Stretch("bias", 0, 1, 0),),
        (),
        (),
        (),
    ]
    assert split_together(one, [0], 3, ranks=4) == Partition(2, ())
    assert split_each(one, 3, ranks=4) == Partition(1, ())
    assert Partition(2, ()).used == 0


def test_without_zero_every_rank_holds_whole_parameters():
    spread = RankSpread(0, 3, ({"a": 5}, {"b": 1}))
    assert [spread.partition(0, rank).stretches for rank in range(3)] == [
        (Stretch("a", 0, 5, 0),)
    ] * 3
    assert spread.sizes == {"a": 5, "b": 1}


def test_values_are_read_across_ranks_and_padding_is_zero():
    values = ScatteredValues()
    # aaaa | abcc | cc.. as above; the padding of the last rank may be left out.
    flats = [[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    for rank, flat in enumerate(flats):
        values.add("weight", split_together(SIZES, [0, 0, 0], rank, ranks=3), torch.tensor(flat))
    # Zero 3 on two ranks: aaa b cc | aa. . cc
    found = [values.fill("weight", split_each(SIZES, rank, ranks=2)).tolist() for rank in range(2)]
    assert found == [[1, 2, 3, 6, 7, 8], [4, 5, 0, 0, 9, 10]]


def test_a_tensor_of_another_length_is_refused():
    first = split_together(SIZES, [0, 0, 0], 0, ranks=3)
    for length in (3, 5):
        with pytest.raises(ValueError, match=rf"weight has {length} values in a part of 4"):
            ScatteredValues().add("weight", first, torch.zeros(length))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    ways=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=4),
    aligned=st.booleans(),
)
def test_values_survive_any_change_of_ranks_and_stage(sizes, ways, aligned):
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    truth = {name: torch.randn(size) for name, size in named.items()}
    values = scattered(
        RankSpread(0, 1, tuple({name: size} for name, size in named.items())),
        [list(truth.values())],
    )
    for stage, ranks in ways:
        groups = tuple({n: s} for n, s in named.items()) if stage == 0 else (named,)
        padding = [3 if aligned else 0] * len(named)
        spread = RankSpread(stage, ranks, groups, (padding,) if stage in (1, 2) else ())
        holders = range(1 if stage == 0 else ranks)
        parts = [spread.partition(index, rank) for rank in holders for index in range(len(groups))]
        assert sum(stretch.length for part in parts for stretch in part.stretches) == sum(sizes)
        flats = [
            [values.fill("weight", spread.partition(index, rank)) for index in range(len(groups))]
            for rank in holders
        ]
        values = scattered(spread, flats)
    for name, size in named.items():
        assert torch.equal(values.fill("weight", split_each({name: size}, 0, ranks=1)), truth[name])


def scattered(spread, flats):
    """The values of all ranks, as they would be read from their files."""
    values = ScatteredValues()
    for rank, of_rank in enumerate(flats):
        for index, flat in enumerate(of_rank):
            values.add("weight", spread.partition(index, rank), flat)
    return values
