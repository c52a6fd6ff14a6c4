import re
import signal
from functools import partial
from pathlib import Path

import pytest

from align import pipeline
from align.schemas.errors import UsageError
from align.stages import storage, tracking, train
from align.stages.storage.failpoints import NAMES, OF_A_CACHE, Trigger, parse
from support.made_caches import in_child, make_cache, tree_of


def test_a_list_of_failpoints_is_read():
    assert parse(" gc.done=kill@3 , plan.after_link=eio,") == {
        "gc.done": Trigger("kill", 3),
        "plan.after_link": Trigger("eio", 1),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere=kill", "known names: part.before_rename"),
        ("gc.done=explode", "known actions: kill, term, eio, enospc"),
        ("gc.done", "known actions"),
        ("gc.done=kill@0", "visits"),
        ("gc.done=kill@x", "visits"),
    ],
)
def test_a_failpoint_that_means_nothing_is_refused(text, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse(text)


def test_every_named_failpoint_is_somewhere_in_the_code():
    rooms = [Path(room.__path__[0]) for room in (pipeline, storage, tracking, train)]
    source = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    reached = set(re.findall(r'reach\("([\w.]+)"\)', source))
    for way, label in re.findall(
        r'\b(?:fs|places)\.(publish|put_if_absent|replace_known)\(.*label="(\w+)"', source
    ):
        step = "link" if way == "put_if_absent" else "rename"
        reached |= {f"{label}.before_{step}", f"{label}.after_{step}"}
    assert reached == set(NAMES)
    assert len(NAMES) >= 14


@pytest.mark.parametrize("name", OF_A_CACHE)
@pytest.mark.parametrize("action", ["kill", "eio", "term", "enospc"])
def test_a_run_that_fails_anywhere_ends_as_if_it_had_not(tmp_path, clean_tree, name, action):
    """The first time, and killed at the last unit too where a failpoint is passed once per unit."""
    is_of_a_unit = name.startswith(("unit", "shard", "commit"))
    for visit in (1, 3) if is_of_a_unit and action == "kill" else (1,):
        make = partial(make_cache, tmp_path / str(visit))
        expected = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(action, 74 << 8)
        assert in_child(make, f"{name}={action}@{visit}") == expected
        assert in_child(make) == 0
        assert tree_of(tmp_path / str(visit)) == clean_tree


def test_a_run_killed_again_and_again_ends_as_if_it_had_not(tmp_path, clean_tree):
    visits = [f"{name}=kill@{visit}" for name in OF_A_CACHE for visit in (1, 2)]
    for visit in visits[::-1]:
        in_child(lambda: make_cache(tmp_path / "cache"), visit)
    assert in_child(lambda: make_cache(tmp_path / "cache")) == 0
    assert tree_of(tmp_path / "cache") == clean_tree
