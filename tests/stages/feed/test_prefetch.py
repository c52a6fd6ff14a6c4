import threading
import weakref

import pytest

from align.stages.feed.loader import Prefetch
from support.patience import PATIENCE


class Item:
    """Something that can be watched."""


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "align-prefetch"]


def test_items_come_in_order_and_then_end():
    prefetch = Prefetch(range(50), ahead=3)
    assert list(prefetch) == list(range(50))
    assert list(prefetch) == []
    assert not threads()


def test_an_error_comes_where_its_item_would_have_been():
    def items():
        yield 1
        yield 2
        raise ValueError("the third")

    prefetch = Prefetch(items(), ahead=5)
    assert [next(prefetch), next(prefetch)] == [1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(prefetch)
    assert not threads()
    with pytest.raises(StopIteration):
        next(prefetch)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_is_made_than_one_in_use_and_those_ahead(ahead):
    alive = weakref.WeakSet()
    made = [threading.Event() for _ in range(20)]

    def items():
        for event in made:
            item = Item()
            alive.add(item)
            yield item
            del item
            event.set()  # the thread has come back for more, so it has room for more

    prefetch = Prefetch(items(), ahead=ahead)
    most = 0
    for number in range(12):
        item = next(prefetch)
        if ahead:
            assert made[number + ahead - 1].wait(PATIENCE)
        most = max(most, len(alive))
        del item
    assert most == 1 + ahead
    prefetch.close()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_early_ends_the_thread(taken):
    prefetch = Prefetch(iter(int, 1), ahead=2)
    for _ in range(taken):
        next(prefetch)
    prefetch.close()
    prefetch.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(prefetch)
