import pytest


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def stopped_ranks(request, alone, spread):
    """What each rank did; only the last one had a reason."""
    seen = alone if request.param == 1 else spread
    return [rank["stop reasons"] for rank in seen]


def test_a_reason_of_one_rank_stops_all(stopped_ranks):
    for rank in stopped_ranks:
        assert rank["signal"] == "signal"
        assert rank["time"] == "time"


def test_a_signal_comes_before_the_end_of_time(stopped_ranks):
    assert [rank["both"] for rank in stopped_ranks] == ["signal"] * len(stopped_ranks)


def test_without_a_reason_nobody_stops(stopped_ranks):
    assert [rank["none"] for rank in stopped_ranks] == [None] * len(stopped_ranks)


def test_all_ranks_stop_before_the_same_step_and_save_there(stopped_ranks):
    for rank in stopped_ranks:
        assert rank["in the middle"] == [3, 3, "signal", [3]]  # steps done, cursor, saves


@pytest.mark.parametrize("where", ["failure", "failed evaluation"])
def test_a_rank_that_cannot_read_ends_all_and_says_why(stopped_ranks, where):
    *others, last = [rank[where] for rank in stopped_ranks]
    assert last == "part-3 is damaged"
    for message in others:
        assert message == "Another rank could not read its rows; it says which."
