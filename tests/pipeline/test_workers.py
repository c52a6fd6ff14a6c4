"""One owner, any number of parts: who works on a folder never shows in its bytes."""

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.executor import Share
from align.schemas.config import DataOptions
from align.schemas.errors import LockedError
from align.stages.storage.cache_folder import CacheFolder
from support.patience import PATIENCE
from support.stage_one import Gate, child, contents, run

KILLED = -signal.SIGKILL


def joined(*processes):
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def parts(count):
    return [Share(number + 1, count) for number in range(count)]


def test_of_runs_at_once_one_works_and_the_other_is_told_who(config, clean, tmp_path):
    gate = Gate()
    owner = child(config, reference=gate.reference())
    assert gate.reached.wait(PATIENCE)
    assert joined(child(config, stderr=tmp_path / "said")) == [75]
    said = (tmp_path / "said").read_text()
    place = f"process {owner.pid} on {socket.gethostname()}"
    assert f"{config.cache.output} is in use by {place}" in said
    assert "choose another --output" in said
    gate.opened.set()
    assert joined(owner) == [0]
    assert run(config).was_complete  # who comes after the end finds the work done
    assert contents(config.cache.output) == clean


def test_parts_one_after_the_other_in_any_order_end_in_the_same_bytes(config, clean):
    done = [run(config, share=parts(3)[number]) for number in (2, 1, 0)]
    assert [one.has_published for one in done] == [False, False, True]
    assert [one.whole is not None for one in done] == [False, False, True]
    assert sum(one.tally.units for one in done) == 8
    assert contents(config.cache.output) == clean


def test_parts_may_start_and_end_in_any_order(config, clean):
    order = (2, 0, 1)
    gates = {number: Gate() for number in order}
    runs = []
    for number in order:
        reference = gates[number].reference()
        runs.append(child(config, share=parts(3)[number], reference=reference))
        assert gates[number].reached.wait(PATIENCE)  # each has begun before the next starts
    for number in reversed(order):
        gates[number].opened.set()
    assert joined(*runs) == [0, 0, 0]
    assert contents(config.cache.output) == clean


def test_a_call_without_a_part_does_what_parts_that_never_came_left(config, clean):
    left = run(config, share=Share(2, 4))
    assert left.tally.units == 2
    whole = run(config)
    assert whole.tally.units == 6
    assert contents(config.cache.output) == clean


def test_the_number_of_parts_may_change_between_runs(config, clean):
    stopped = [child(config, "commit.done=kill@1", share=share) for share in parts(2)]
    assert joined(*stopped) == [KILLED, KILLED]
    assert joined(child(config, "commit.done=kill@1", share=Share(1, 3))) == [KILLED]
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


def test_a_part_that_still_works_while_another_publishes_ends_well(config, clean):
    gate = Gate()
    late = child(config, share=Share(1, 2), reference=gate.reference())
    assert gate.reached.wait(PATIENCE)  # it is about to score, while a whole call does everything
    assert run(config).manifest.rows == 120
    gate.opened.set()
    assert joined(late) == [0]
    assert contents(config.cache.output) == clean


def test_a_part_beside_other_data_in_its_folder_is_refused_once_that_is_published(
    config, data, tmp_path
):
    lines = data.paired_jsonl.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:60]))
    few = replace(config, data=DataOptions(files=[str(tmp_path / "few.jsonl")]))
    gate = Gate()
    late = child(config, share=Share(1, 2), reference=gate.reference(), stderr=tmp_path / "said")
    assert gate.reached.wait(PATIENCE)
    run(few)
    gate.opened.set()
    assert joined(late) == [LockedError.exit_code]
    assert "another run, on other data, has completed" in (tmp_path / "said").read_text()
    assert joined(child(config, share=Share(1, 1))) == [0]


@pytest.mark.parametrize(  # as it encodes, pairs
    ("place", "visit"), [("part.before_rename", 1), ("part.after_link", 3)]
)
def test_parts_prepare_together_and_one_killed_at_it_changes_nothing(config, clean, place, visit):
    killed, other = (
        child(config, f"{place}=kill@{visit}", share=Share(1, 2)),
        child(config, share=Share(2, 2)),
    )
    assert joined(other) == [0]
    assert joined(killed)[0] in {0, KILLED}
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


def test_drafts_of_dead_processes_go(config, clean):
    assert joined(child(config, "part.before_rename=kill")) == [KILLED]
    (work,) = CacheFolder(Path(config.cache.output)).works()
    (dead,) = work.spool.glob("encoded/.*.tmp")
    assert joined(child(config, "plan.before_link=kill")) == [KILLED]
    assert not dead.exists()
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


def test_children_of_a_run_do_not_keep_its_folder_locked(config):
    gate = Gate()
    owner = child(replace(config, data=replace(config.data, workers=2)), reference=gate.reference())
    assert gate.reached.wait(PATIENCE)
    os.kill(owner.pid, 9)
    assert joined(owner) == [KILLED]
    assert run(config).manifest.rows == 120
