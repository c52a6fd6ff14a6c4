"""A disk that forgets what was not synced, driven by the log of what we did to it."""

import contextlib
import dataclasses
import hashlib
import random
import re
from functools import cache

import pytest

from align.schemas.cache import Commit, Manifest, Plan
from align.schemas.json_codec import from_json
from align.stages.storage import failpoints
from align.stages.storage.cache_folder import COMMIT_NAME, ROOT_NAME, WORK_NAME
from support.power_loss import Killed, Promise, Seen, ops_of, states_of, watcher


def first_broken(log, base):
    """What the first bad state is bad for; None when there is none."""
    keys = tuple(dict.fromkeys(entry.key for entry in log if isinstance(entry, Promise)))
    wrongs = (broken(left, promises, keys) for left, promises in states_of(log, base))
    return next(filter(None, wrongs), None)


def broken(left, promises, keys):
    """What is wrong with the files a crash left behind; `keys` are the plans in their order."""
    left = {path.removeprefix("cache/"): content for path, content in left.items()}
    if "data/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    for path, content in left.items():
        folder, _, name = path.rpartition("/")
        if name and folder in ("data", "quarantine") and f"-{sha256(content)[:16]}." not in name:
            return f"{path} is not what its name says"
        if name == "plan.json" and parsed(Plan, content) is None:
            return f"{path} is torn"
        if PLAN.fullmatch(path) and (wrong := _broken_plan(left, path, content)):
            return wrong
        if COMMIT.fullmatch(path) and (wrong := _broken_commit(left, path, content)):
            return wrong
    manifest = parsed(Manifest, left.get("manifest.json"))
    if "manifest.json" in left and (wrong := _broken_manifest(left, manifest)):
        return wrong
    reached = keys.index(manifest.plan_key) if manifest else -1
    wrongs = (_broken_promise(left, promise, keys, reached) for promise in promises)
    return next(filter(None, wrongs), None)


def _broken_promise(left, promise, keys, reached):
    kept = f"_align/{promise.key[:16]}/{promise.event}.json" in left
    if keys.index(promise.key) > reached and not kept:
        return f"{promise.event} was promised and is gone"
    if promise.event == "manifest" and keys.index(promise.key) < reached:
        earlier = [parsed(Manifest, left[path]) for path in left if ROOT.fullmatch(path)]
        mine = [one for one in earlier if one and one.plan_key == promise.key]
        if not mine or _broken_manifest(left, mine[0]):
            return "what the cache was before it grew is gone"
    return None


def _broken_commit(left, path, content):
    commit = parsed(Commit, content)
    if commit is None:
        return f"{path} is torn"
    if sha256(left.get(f"data/{commit.file}", b"")) != commit.sha256:
        return f"{path} names a shard that is not there"
    if any(sha256(left.get(entry.file, b"")) != entry.sha256 for entry in commit.quarantine):
        return f"{path} names a quarantine that is not there"
    plan = parsed(Plan, left.get(path.rsplit("/", 2)[0] + "/plan.json"))
    if plan is None:
        return f"{path} has no plan"
    return None


def _broken_plan(left, path, content):
    named = parsed(Plan, content).quarantine
    if any(sha256(left.get(entry.file, b"")) != entry.sha256 for entry in named):
        return f"{path} names a quarantine that is not there"
    return None


def _broken_manifest(left, manifest):
    if manifest is None:
        return "the manifest is torn"
    files = {f"data/{shard.file}": shard.sha256 for shard in manifest.shards}
    files |= {entry.file: entry.sha256 for entry in manifest.quarantine}
    missing = [name for name, digest in files.items() if sha256(left.get(name, b"")) != digest]
    return f"the manifest names {missing[0]}, which is not there" if missing else None


ROOT = re.compile(rf"_align/roots/{ROOT_NAME.pattern}")
PLAN = re.compile(rf"_align/{WORK_NAME.pattern}/plan\.json")
COMMIT = re.compile(rf"_align/{WORK_NAME.pattern}/commits/{COMMIT_NAME.pattern}")


@cache
def sha256(content):
    return hashlib.sha256(content).hexdigest()


@cache
def parsed(kind, content):
    try:
        return from_json(kind, content or b"")
    except ValueError:
        return None


@pytest.fixture(scope="module")
def record_caches(tmp_path_factory, make_cache):
    """Runs one after another in one folder; `(units, n)` is killed before its nth operation."""

    def record(*runs):
        base, log = tmp_path_factory.mktemp("log"), []
        for units, last in runs:

            def told(event, key):
                log.append(Promise(event, key))

            with failpoints.watch(watcher(log, last)), contextlib.suppress(Killed):
                make_cache(base / "cache", units, told=told, rejects=units == FIRST)
        return log, base

    return record


FIRST, GROWN = (1, 2, 3), (1, 9, 3, 4)
WHOLE = -1


@pytest.fixture(scope="module", name="whole_caches")
def _whole_caches(record_caches):
    return record_caches((FIRST, WHOLE))


@pytest.fixture(scope="module", name="grown")
def _grown(record_caches):
    return record_caches((FIRST, WHOLE), (GROWN, WHOLE))


def test_a_power_loss_breaks_no_promise(whole_caches):
    log, base = whole_caches
    assert len(log) > 60
    assert first_broken(log, base) is None


def test_a_power_loss_while_a_cache_grows_breaks_no_promise(grown):
    assert first_broken(*grown) is None


@pytest.mark.slow
def test_a_power_loss_after_a_kill_and_a_rerun_breaks_no_promise(record_caches, whole_caches):
    for last in range(len(ops_of(whole_caches[0]))):
        log, base = record_caches((FIRST, last), (FIRST, WHOLE))
        assert first_broken(log, base) is None, last


def test_after_a_power_loss_the_same_command_ends_as_ever(whole_caches, tmp_path, make_cache, tree):
    log, base = whole_caches
    states = {tuple(sorted(left.items())): left for left, _ in states_of(log, base)}
    draw = random.Random(0)
    for number, left in enumerate(draw.sample(list(states.values()), 60)):
        for path, content in left.items():
            file = tmp_path / str(number) / path
            (file if path.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                file.write_bytes(content)
        make_cache(tmp_path / str(number) / "cache", FIRST)
        assert tree(tmp_path / str(number) / "cache") == tree(base / "cache")


@pytest.mark.slow
def test_every_fsync_in_the_code_is_one_that_must_be_there(whole_caches, grown, record_caches):
    """Each is left out in turn, once, and some power loss in some history finds it out."""
    renamed = next(
        n for n, op in enumerate(ops_of(whole_caches[0])) if op.target and op.target.name[0] == "m"
    )
    linked = next(n for n, op in enumerate(ops_of(whole_caches[0])) if op.name == "link")
    histories = [
        whole_caches,
        grown,
        record_caches((GROWN, WHOLE)),
        record_caches((FIRST, linked + 1), (FIRST, WHOLE)),
        record_caches((FIRST, renamed + 1), (FIRST, WHOLE)),
    ]
    sites, missed = set(), set()
    for log, base in histories:
        for index, op in enumerate(log):
            if isinstance(op, Seen) and op.name.startswith("fsync"):
                sites.add(op.site)
                if first_broken(log[:index] + log[index + 1 :], base):
                    missed.add(op.site)
    assert len(sites) >= 10
    assert missed == sites


SWAPS = {  # what comes too early -> before what
    "a shard gets its name before its bytes are safe": (
        "rename data/part-00000001",
        "fsync 00000001-",
    ),
    "a commit stands before the name of its shard is safe": ("link .00000000", "fsync_folder data"),
    "a commit stands before its bytes are safe": ("link .00000000", "fsync .00000000"),
    "a commit stands before its shard does": ("link .00000000", "rename data/part-"),
    "a quarantine is named before its bytes are safe": ("rename quarantine/", "fsync quarantine-"),
    "a commit stands before its quarantine does": ("link .00000000", "fsync_folder quarantine"),
    "the plan stands before its bytes are safe": ("link .plan", "fsync .plan"),
    "the manifest stands before its bytes are safe": ("rename cache/manifest", "fsync .manifest"),
    "work is forgotten before the manifest stands": (
        "rename _align/.trash",
        "fsync_folder commits",
    ),
    "work is removed before it is forgotten": ("remove_tree .trash", "fsync_folder _align"),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_two_steps_in_the_wrong_order_are_found_out(whole_caches, swap):
    log, base = whole_caches
    early, late = SWAPS[swap]
    labels = [_label(entry) for entry in log]
    source = next(n for n, label in enumerate(labels) if label.startswith(early))
    before = max(n for n, label in enumerate(labels[:source]) if label.startswith(late))
    moved = log[source]
    between = [_follow(entry, moved) for entry in log[before:source]]
    swapped = [*log[:before], moved, *between, *log[source + 1 :]]
    assert first_broken(swapped, base) is not None


def _follow(entry, moved):
    renamed = moved.name == "rename" and getattr(entry, "path", None) == moved.path
    return dataclasses.replace(entry, path=moved.target) if renamed else entry


def _label(entry):
    if isinstance(entry, Promise):
        return entry.event
    if entry.name == "rename":
        return f"rename {entry.target.parent.name}/{entry.target.name}"
    return f"{entry.name} {entry.path.name}"
