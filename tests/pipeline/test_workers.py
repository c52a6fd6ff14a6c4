"""One owner, any number of helpers: who works on a folder never shows in its bytes."""

import os
import socket
from dataclasses import replace
from multiprocessing.connection import wait

import pytest

from align.pipeline.scoring_worker import Worker
from support.stage_one import Gate, child, contents, run


def joined(*processes):
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def helper(rank, world):
    return Worker(rank, world, joins=True)


def test_of_four_runs_at_once_one_works_and_three_are_refused(config, clean):
    gate = Gate()
    runs = [child(config, reference=gate.reference()) for _ in range(4)]
    # The owner cannot finish before the gate is opened, so the others must find it at work.
    while len([process for process in runs if process.exitcode is None]) > 1:
        wait([process.sentinel for process in runs if process.exitcode is None], timeout=60)
    gate.opened.set()
    assert sorted(joined(*runs)) == [0, 75, 75, 75]
    assert contents(config.cache.output) == clean


def test_a_refusal_names_the_process_that_works_there(config, tmp_path):
    gate = Gate()
    owner = child(config, reference=gate.reference())
    assert gate.reached.wait(60)
    late = child(config, stderr=tmp_path / "said")
    assert joined(late) == [75]
    said = (tmp_path / "said").read_text()
    assert (
        f"{config.cache.output} is in use by process {owner.pid} on {socket.gethostname()}" in said
    )
    assert "Wait for it, choose another --output, or help it with --join" in said
    gate.opened.set()
    assert joined(owner) == [0]
    assert run(config).was_complete  # who comes after the end finds the work done


def test_a_lock_left_by_a_killed_run_does_not_block_the_next(config, clean):
    assert joined(child(config, "commit.done=kill@2")) == [-9]
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


@pytest.mark.parametrize("world", [2, 3])
def test_helpers_end_in_the_same_bytes_as_one_worker(config, clean, world):
    runs = [child(config, worker=helper(rank, world)) for rank in range(world)]
    assert joined(*runs) == [0] * world
    assert contents(config.cache.output) == clean


def test_a_helper_without_a_rank_steals_what_is_left(config, clean):
    gate = Gate()
    owner = child(config, reference=gate.reference())
    assert gate.reached.wait(60)
    second, third = (child(config, worker=Worker(joins=True)) for _ in range(2))
    second.join(0.2)
    gate.opened.set()
    assert joined(owner, second, third) == [0, 0, 0]
    assert contents(config.cache.output) == clean


@pytest.mark.parametrize("place", ["unit.scored", "commit.before_link", "commit.after_link"])
def test_a_helper_killed_in_the_middle_changes_nothing(config, clean, place):
    runs = [
        child(config, worker=helper(0, 3)),
        child(config, f"{place}=kill@2", worker=helper(1, 3)),
        child(config, worker=helper(2, 3)),
    ]
    codes = joined(*runs)
    assert (codes[0], codes[2]) == (0, 0)
    assert codes[1] in {0, -9}  # 0 when the others left it nothing to die of
    assert contents(config.cache.output) == clean


def test_a_helper_whose_owner_is_killed_finishes_and_publishes(config, clean):
    owners_gate, helpers_gate = Gate(), Gate()
    owner = child(config, "unit.scored=kill@2", reference=owners_gate.reference())
    assert owners_gate.reached.wait(60)
    left = child(config, worker=Worker(joins=True), reference=helpers_gate.reference())
    assert helpers_gate.reached.wait(60)  # it has joined: the owner holds the folder
    owners_gate.opened.set()
    assert joined(owner) == [-9]
    helpers_gate.opened.set()
    assert joined(left) == [0]
    assert contents(config.cache.output) == clean


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_ranks_may_start_in_any_order(config, clean, order):
    gates = {rank: Gate() for rank in order}
    runs = []
    for rank in order:
        runs.append(child(config, worker=helper(rank, 4), reference=gates[rank].reference()))
        assert gates[rank].reached.wait(60)  # each has begun before the next starts
    for rank in reversed(order):
        gates[rank].opened.set()
    assert joined(*runs) == [0, 0, 0, 0]
    assert contents(config.cache.output) == clean


def test_one_rank_of_many_does_the_work_of_those_that_never_came(config, clean):
    run(config, worker=helper(3, 4))
    assert contents(config.cache.output) == clean


def test_the_number_of_workers_may_change_between_runs(config, clean):
    stopped = [child(config, "commit.done=kill@1", worker=helper(rank, 2)) for rank in range(2)]
    assert -9 in joined(*stopped)
    assert joined(child(config, "commit.done=kill@2", worker=helper(0, 3))) == [-9]
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


def test_tokenizing_processes_change_no_byte(config, clean):
    run(replace(config, data=replace(config.data, workers=2)))
    assert contents(config.cache.output) == clean


def test_children_of_a_run_do_not_keep_its_folder_locked(config):
    gate = Gate()
    owner = child(replace(config, data=replace(config.data, workers=2)), reference=gate.reference())
    assert gate.reached.wait(60)
    os.kill(owner.pid, 9)
    assert joined(owner) == [-9]
    assert run(config).manifest.rows == 120
