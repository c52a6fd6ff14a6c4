"""What has to hold of the files that a power loss leaves: of a cache, a run, a part of preparing.

Each function says what is wrong with such files, and nothing where nothing is.
"""

import hashlib
import json
import re
from functools import cache

from align.schemas.cache import Commit, Manifest, Plan
from align.schemas.json_codec import CodecError, from_json, from_signed_json
from align.schemas.preparing import EncodedPart
from align.stages.storage.cache_folder import COMMIT_NAME, ROOT_NAME, WORK_NAME
from align.stages.storage.run_folder import RECORD_NAME
from support.checkpoint_saves import content

ROOT = re.compile(rf"_align/roots/{ROOT_NAME.pattern}")
PLAN = re.compile(rf"_align/{WORK_NAME.pattern}/plan\.json")
COMMIT = re.compile(rf"_align/{WORK_NAME.pattern}/commits/{COMMIT_NAME.pattern}")
STEP = re.compile(r"checkpoints/(step-([0-9]{8}))/")


def broken_cache(left, promises):
    """Of a cache; the keys of promises are the plans in their order."""
    left = {path.removeprefix("cache/"): content for path, content in left.items()}
    if "data/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    for path, held in left.items():
        folder, _, name = path.rpartition("/")
        if name and folder in ("data", "quarantine") and f"-{sha256(held)[:16]}." not in name:
            return f"{path} is not what its name says"
        if PLAN.fullmatch(path) and (wrong := _broken_plan(left, path, held)):
            return wrong
        if COMMIT.fullmatch(path) and (wrong := _broken_commit(left, path, held)):
            return wrong
    manifest = parsed(Manifest, left.get("manifest.json"))
    if "manifest.json" in left and (wrong := _broken_manifest(left, manifest)):
        return wrong
    keys = tuple(dict.fromkeys(promise.key for promise in promises))
    reached = keys.index(manifest.plan_key) if manifest else -1
    wrongs = (_broken_promise(left, promise, keys, reached) for promise in promises)
    return next(filter(None, wrongs), None)


def _broken_plan(left, path, content):
    plan = parsed(Plan, content)
    if plan is None:
        return f"{path} is torn"
    if any(sha256(left.get(entry.file)) != entry.sha256 for entry in plan.quarantine):
        return f"{path} names a quarantine that is not there"
    return None


def _broken_commit(left, path, content):
    commit = parsed(Commit, content)
    if commit is None:
        return f"{path} is torn"
    if sha256(left.get(f"data/{commit.file}")) != commit.sha256:
        return f"{path} names a shard that is not there"
    if any(sha256(left.get(entry.file)) != entry.sha256 for entry in commit.quarantine):
        return f"{path} names a quarantine that is not there"
    if parsed(Plan, left.get(path.rsplit("/", 2)[0] + "/plan.json")) is None:
        return f"{path} has no plan"
    return None


def _broken_manifest(left, manifest):
    if manifest is None:
        return "the manifest is torn"
    files = {f"data/{shard.file}": shard.sha256 for shard in manifest.shards}
    files |= {entry.file: entry.sha256 for entry in manifest.quarantine}
    missing = [name for name, digest in files.items() if sha256(left.get(name)) != digest]
    return f"the manifest names {missing[0]}, which is not there" if missing else None


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


def broken_run(left, promises):
    """Of a training run; the keys of promises are steps."""
    left = {path.removeprefix("run/"): content for path, content in left.items()}
    if "checkpoints/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    if wrong := _broken_model(left, promises):
        return wrong
    steps = {int(name[2]): path for path in left if (name := STEP.fullmatch(path))}
    for step, prefix in steps.items():
        files = {path.removeprefix(prefix): left[path] for path in left if path.startswith(prefix)}
        if wrong := _broken_step(step, {k: v for k, v in files.items() if k and k[-1] != "/"}):
            return wrong
    latest = left.get("checkpoints/latest")
    if latest is not None and latest.decode() not in [f"step-{step:08d}\n" for step in steps]:
        return f"latest says {latest!r}"
    promised = max((promise.key for promise in promises), default=0)
    if promised > max(steps, default=0):
        return f"step {promised} was promised and is gone"
    if promised and (latest is None or int(latest[5:]) < promised):
        return f"latest no longer knows of step {promised}"
    return None


def _broken_model(left, promises):
    if "model/" not in left:
        told = any(promise.event == "model" for promise in promises)
        return "the model was promised and is gone" if told else ""
    names = ("config.json", "model.safetensors")
    whole = all(left.get(f"model/{name}") == content(0, name) for name in names)
    return "" if whole else "the model is torn"


def _broken_step(step, files):
    try:
        record = json.loads(files.pop(RECORD_NAME))
    except (KeyError, ValueError):
        return f"step {step} has no record"
    named = {file["path"]: file["sha256"] for file in record["files"]}
    found = {path: sha256(content) for path, content in files.items()}
    return "" if found == named else f"step {step} is torn"


def broken_spool(left, promises):
    """Of the parts of preparing; the keys of promises are their numbers."""
    for path, held in left.items():
        name = path.removeprefix("spool/encoded/")
        if COMMIT_NAME.fullmatch(name):
            try:
                file = from_signed_json(EncodedPart, held).file
            except CodecError:
                return f"{path} is torn"
            if sha256(left.get(f"spool/encoded/{file.name}")) != file.sha256:
                return f"{path} names a file that is not there"
    gone = [one.key for one in promises if f"spool/encoded/{one.key}.json" not in left]
    return f"{gone[0]} was promised and is gone" if gone else None


@cache
def sha256(content):
    """The digest of a file's bytes; of one that is not there, of nothing."""
    return hashlib.sha256(content or b"").hexdigest()


@cache
def parsed(kind, content):
    """What a file says; None where it cannot be read."""
    try:
        return from_json(kind, content or b"")
    except ValueError:
        return None
