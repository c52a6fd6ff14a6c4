"""One owner, any number of parts: who works on a folder never shows in its bytes."""

import os
import random
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.parts import Part
from align.pipeline.precompute.precompute import precompute
from align.schemas.data_options import DataOptions
from align.schemas.errors import FingerprintError, Interrupted, LockedError
from align.stages.data import chat_template
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import CacheWork, unfinished_work
from align.stages.storage.copies import damaged_objects
from align.stages.storage.remote import Remote
from support import disk_faults
from support.command import success
from support.mlflow_runs import open_store, the_run
from support.patience import PATIENCE
from support.refusals import refuses, require_names
from support.stage_one import Acting, Gate, child, contents, run
from support.stub_reference import StubReference
from support.trainings import KILLED

SEED = int(os.environ.get("ALIGN_TEST_SEED", "16"))
PLACES = [name for name in disk_faults.OF_STAGE_ONE if "rejected" not in name]
FEW_AND_MANY = pytest.mark.parametrize("strikes", [1, pytest.param(16, marks=pytest.mark.long)])


def joined(*processes):
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def parts(count):
    return [Part(number + 1, count) for number in range(count)]


def test_of_runs_at_once_one_works_and_the_other_is_told_who(config, clean, tmp_path):
    gate = Gate()
    owner = child(config, reference=gate.reference())
    assert gate.reached.wait(PATIENCE)
    assert joined(child(config, stderr=tmp_path / "said")) == [75]
    said = (tmp_path / "said").read_text()
    require_names(said, config.cache.output, owner.pid, socket.gethostname(), "--output")
    gate.opened.set()
    assert joined(owner) == [0]
    assert run(config).was_complete  # who comes after the end finds the work done
    assert contents(config.cache.output) == clean


def test_parts_one_after_the_other_in_any_order_end_in_the_same_bytes(config, clean):
    """The number of parts may change; a call without one does what parts that never came left."""
    own = (parts(4)[1], parts(3)[2], None)
    done = [run(config, part=part) for part in own]
    assert done[0].counts.shards == 2
    assert sum(one.counts.shards for one in done) == 8
    assert [one.manifest is not None for one in done[:2]] == [False, False]
    assert contents(config.cache.output) == clean


def test_parts_may_start_and_end_in_any_order(config, clean):
    gates, runs = {number: Gate() for number in (2, 0, 1)}, []
    for number, gate in gates.items():
        runs.append(child(config, part=parts(3)[number], reference=gate.reference()))
        assert gate.reached.wait(PATIENCE)  # each has begun before the next starts
    for gate in reversed(gates.values()):
        gate.opened.set()
    assert joined(*runs) == [0, 0, 0]
    assert contents(config.cache.output) == clean


def test_a_part_that_still_works_while_another_publishes_ends_well(config, clean):
    gate = Gate()
    late = child(config, part=Part(1, 2), reference=gate.reference())
    assert gate.reached.wait(PATIENCE)  # it is about to score, while a whole call does everything
    assert run(config).manifest.rows == 120
    gate.opened.set()
    assert joined(late) == [0]
    assert contents(config.cache.output) == clean


@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_part_of_other_settings_changes_no_finished_cache(config, tmp_path, request, place):
    root = tmp_path if place == "disk" else request.getfixturevalue("bucket")
    late, other = (
        replace(config, cache=replace(config.cache, output=f"{root}/cache", kl_pairs=pairs))
        for pairs in (0, 1)
    )
    made = []
    progress = Acting(begun=lambda _: made or made.append(run(other).manifest))
    with refuses(LockedError, f"{root}/cache"):
        precompute(late, StubReference(), progress=progress, part=Part(1, 1))
    folder = CacheWork.at(f"{root}/cache", made[0].plan_key)
    assert folder.manifest() == made[0]
    assert run(other).was_complete
    assert folder.is_tidy(made[0])
    with refuses(FingerprintError, "cache.kl_pairs: ", "1", "0"):
        run(late)


def test_a_cache_that_was_removed_from_a_bucket_is_made_again(config, bucket):
    """What this machine still has of it counts for nothing."""
    there = replace(config, cache=replace(config.cache, output=f"{bucket}/cache"))
    made = run(there).manifest
    assert run(there).was_complete
    remote = Remote(f"{bucket}/cache")
    remote.delete(remote.list())
    again = run(there)
    assert (again.manifest, again.was_complete) == (made, False)
    assert damaged_objects(f"{bucket}/cache") == []


def test_parts_prepare_together_and_drafts_of_one_killed_at_it_go(config, clean):
    """Killed before its rows have a record, and the next one when they have."""
    first = child(config, "before:rename:encoded/*.json=kill", part=Part(1, 2))
    assert joined(first) == [KILLED]
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    dead = work.encoded / f".00000000.arrow.{'0' * 16}.tmp"
    dead.write_bytes(b"half")
    killed = child(config, "after:rename:encoded/*.json=kill", part=Part(1, 2))
    other = child(config, part=Part(2, 2))
    assert joined(other) == [0]
    assert joined(killed)[0] in {0, KILLED}
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


def test_a_stopped_part_leaves_its_work_for_the_others(config, clean, tmp_path):
    gate = Gate()
    said = tmp_path / "said"
    stopped = child(config, part=Part(2, 2), reference=gate.reference(), stderr=said)
    assert gate.reached.wait(PATIENCE)
    os.kill(stopped.pid, signal.SIGTERM)
    assert joined(stopped) == [143]
    assert "same command" in said.read_text()
    assert run(config, part=Part(1, 2)).manifest is None
    assert run(config, part=Part(2, 2)).has_published
    assert contents(config.cache.output) == clean


def test_a_signal_in_a_chat_template_is_no_bad_row(config, data, tmp_path, monkeypatch):
    """Whatever a template raises makes its row bad; a signal is not of the template's making."""
    chat = replace(config, data=DataOptions(files=[str(data.paired_chat)], max_bad_frac=0.1))
    run(replace(chat, cache=replace(chat.cache, output=str(tmp_path / "clean"))))
    render = chat_template.render_jinja_template

    def interrupted(conversations, **how):
        if conversations[0] and "question" not in str(conversations):  # which a probe asks
            raise Interrupted(signal.SIGTERM)
        return render(conversations, **how)

    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "render_jinja_template", interrupted)
        with pytest.raises(Interrupted):
            run(chat)
    run(chat)
    assert contents(config.cache.output) == contents(tmp_path / "clean")


def strike(run_all, count, strikes):
    """All are killed at places that are drawn, again and again; then they go on to the end."""
    draw = random.Random(SEED)
    assert run_all(["before:fsync:tmp/*.parquet=kill@2"] * count) == [KILLED] * count
    for _ in range(strikes):
        fates = [f"{draw.choice(PLACES)}=kill" for _ in range(count)]
        assert {*run_all(fates)} <= {0, KILLED}, (SEED, fates)
    assert run_all([""] * count) == [0] * count


@FEW_AND_MANY
def test_three_parts_that_are_killed_end_in_the_same_bytes(config, clean, strikes):
    def run_all(fates):
        own = zip(fates, parts(3), strict=True)
        return joined(*[child(config, fate, part=part) for fate, part in own])

    strike(run_all, 3, strikes)
    run(config)  # which removes what a publisher that was killed has left
    assert contents(config.cache.output) == clean


@FEW_AND_MANY
def test_two_ranks_that_are_killed_end_in_the_same_bytes(course, world, tmp_path, strikes):
    words = ("precompute-ref", world.data.paired, "--model", course.model, "--no-mlflow")
    words += ("--shards", 8, "--set", "cache.reuse_known=false", "--output", tmp_path)

    def run_all(fates):
        answers = course.server.start(*words, ranks=2, faults=fates).answers()
        return [answer.code for answer in answers]

    strike(run_all, 2, strikes)
    course.server.success(*words)
    assert contents(tmp_path) == contents(course.cache)


def test_of_ranks_one_records_a_run(world, tmp_path, own_uri, monkeypatch, no_mlflow_settings):
    words = ("precompute-ref", world.data.paired, "--model", world.model)
    words += ("--output", tmp_path / "cache", "--set", f"tracking.uri={own_uri}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        success(*words)
        if rank == "1":
            assert open_store(own_uri).get_experiment_by_name("align") is None
    assert the_run(open_store(own_uri), "align").info.status == "FINISHED"
