"""Where values lie under each ZeRO stage, worked out by hand."""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from align.stages.engine.partitions import (
    PartitionLayout,
    ScatteredValues,
    split_each,
    split_together,
)
from support.refusals import refuses

SIZES = {"a": 5, "b": 1, "c": 4}


def cut(split, *, ranks):
    """What each rank holds, as (length, the stretches as NAME BEGIN-END at PLACE)."""
    parts = [split(rank, ranks=ranks) for rank in range(ranks)]
    return [
        (
            part.length,
            [f"{s.name} {s.begin}-{s.begin + s.length} at {s.at}" for s in part.fragments],
        )
        for part in parts
    ]


def test_zero_1_and_2_cut_all_parameters_as_one():
    # aaaaabcccc are ten values; two ranks hold twelve, a multiple of four: six each.
    together = partial(split_together, SIZES, [0, 0, 0])
    two = [(6, ["a 0-5 at 0", "b 0-1 at 5"]), (6, ["c 0-4 at 0"])]
    assert cut(together, ranks=2) == two
    # Three ranks hold twelve as well: four each, aaaa | abcc | cc and two of padding.
    three = ["a 0-4 at 0"], ["a 4-5 at 0", "b 0-1 at 1", "c 0-2 at 2"], ["c 2-4 at 0"]
    assert cut(together, ranks=3) == [(4, part) for part in three]
    # Padded behind each parameter, aaaaa... b... cccc are sixteen places: eight each.
    padded = partial(split_together, SIZES, [3, 3, 0])
    assert cut(padded, ranks=2) == [(8, ["a 0-5 at 0"]), (8, ["b 0-1 at 0", "c 0-4 at 4"])]


def test_zero_3_cuts_each_parameter_by_itself():
    # Of two ranks each holds three of a, one of b and two of c; the last of a and b are padding.
    parts = ["a 0-3 at 0", "b 0-1 at 3", "c 0-2 at 4"], ["a 3-5 at 0", "c 2-4 at 4"]
    assert cut(partial(split_each, SIZES), ranks=2) == [(6, part) for part in parts]


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
        with refuses(ValueError, "weight", length, 4):
            ScatteredValues().add("weight", first, torch.zeros(length))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    ways=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=4),
    aligned=st.booleans(),
)
def test_values_survive_any_change_of_ranks_and_stage(sizes, ways, aligned):
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    truth = {name: torch.randn(size) for name, size in named.items()}
    values = ScatteredValues()
    for name, flat in truth.items():
        values.add("weight", split_each({name: flat.numel()}, 0, ranks=1), flat)
    for stage, ranks in ways:
        groups = tuple({n: s} for n, s in named.items()) if stage == 0 else (named,)
        padding = [3 if aligned else 0] * len(named)
        spread = PartitionLayout(stage, ranks, groups, (padding,) if stage in (1, 2) else ())
        holders = range(1 if stage == 0 else ranks)
        parts = [spread.partition(index, rank) for rank in holders for index in range(len(groups))]
        assert sum(stretch.length for part in parts for stretch in part.fragments) == sum(sizes)
        before, values = values, ScatteredValues()  # as they would be read from the files of all
        for part in parts:
            values.add("weight", part, before.fill("weight", part))
    for name, flat in truth.items():
        whole = split_each({name: flat.numel()}, 0, ranks=1)
        assert torch.equal(values.fill("weight", whole), flat)
