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
    left = {path.removeprefix("cache/"): held for path, held in left.items()}
    if "data/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    for path, held in left.items():
        folder, _, name = path.rpartition("/")
        if name and folder in ("data", "quarantine") and f"-{sha256(held)[:16]}." not in name:
            return f"{path} is not what its name says"
        if wrong := _names_what_is_not_there(left, path, held):
            return f"{path} {wrong}"
    manifest = parsed(Manifest, left.get("manifest.json"))
    keys = list(dict.fromkeys(promise.key for promise in promises))
    reached = keys.index(manifest.plan_key) if manifest and keys else -1
    for event, key in promises:
        kept = f"_align/{key[:16]}/{event}.json" in left
        if keys.index(key) > reached and not kept:
            return f"{event} was promised and is gone"
        earlier = [parsed(Manifest, left[path]).plan_key for path in left if ROOT.fullmatch(path)]
        if event == "manifest" and keys.index(key) < reached and key not in earlier:
            return "what the cache was before it grew is gone"
    return None


def _names_what_is_not_there(left, path, held):
    """What is wrong with a plan, a commit, a manifest or an earlier one: with what it names."""
    if PLAN.fullmatch(path):
        kind, shards = Plan, lambda _: ()
    elif COMMIT.fullmatch(path):
        kind, shards = Commit, lambda commit: (commit,)
        if parsed(Plan, left.get(path.rsplit("/", 2)[0] + "/plan.json")) is None:
            return "has no plan"
    elif path == "manifest.json" or ROOT.fullmatch(path):
        kind, shards = Manifest, lambda manifest: manifest.shards
    else:
        return None
    record = parsed(kind, held)
    if record is None:
        return "is torn"
    files = {f"data/{shard.file}": shard.sha256 for shard in shards(record)}
    files |= {entry.file: entry.sha256 for entry in record.quarantine}
    missing = [name for name, digest in files.items() if sha256(left.get(name)) != digest]
    return f"names {missing[0]}, which is not there" if missing else None


def broken_run(left, promises):
    """Of a training run; the keys of promises are steps."""
    left = {path.removeprefix("run/"): held for path, held in left.items()}
    if "checkpoints/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    model = [left.get(f"model/{name}") for name in ("config.json", "model.safetensors")]
    if "model/" in left and model != [content(0, "config.json"), content(0, "model.safetensors")]:
        return "the model is torn"
    if "model/" not in left and any(event == "model" for event, _ in promises):
        return "the model was promised and is gone"
    steps = {int(name[2]): path for path in left if (name := STEP.fullmatch(path))}
    for step, prefix in steps.items():
        files = {path.removeprefix(prefix): left[path] for path in left if path.startswith(prefix)}
        if wrong := _broken_step(step, {k: v for k, v in files.items() if k and k[-1] != "/"}):
            return wrong
    latest = left.get("checkpoints/latest")
    if latest is not None and latest.decode() not in [f"step-{step:08d}\n" for step in steps]:
        return f"latest says {latest!r}"
    promised = max((step for _, step in promises), default=0)
    if promised > max(steps, default=0):
        return f"step {promised} was promised and is gone"
    if promised and (latest is None or int(latest[5:]) < promised):
        return f"latest no longer knows of step {promised}"
    return None


def _broken_step(step, files):
    try:
        record = json.loads(files.pop(RECORD_NAME))
    except (KeyError, ValueError):
        return f"step {step} has no record"
    named = {file["path"]: file["sha256"] for file in record["files"]}
    found = {path: sha256(held) for path, held in files.items()}
    return "" if found == named else f"step {step} is torn"


def broken_spool(left, promises):
    """Of the parts of preparing; the keys of promises are their numbers."""
    for path, held in left.items():
        if COMMIT_NAME.fullmatch(path.removeprefix("spool/encoded/")):
            try:
                file = from_signed_json(EncodedPart, held).file
            except CodecError:
                return f"{path} is torn"
            if sha256(left.get(f"spool/encoded/{file.name}")) != file.sha256:
                return f"{path} names a file that is not there"
    gone = [number for _, number in promises if f"spool/encoded/{number}.json" not in left]
    return f"{gone[0]} was promised and is gone" if gone else None


@cache
def sha256(held):
    """The digest of a file's bytes; of one that is not there, of nothing."""
    return hashlib.sha256(held or b"").hexdigest()


@cache
def parsed(kind, held):
    """What a file says; None where it cannot be read."""
    try:
        return from_json(kind, held or b"")
    except ValueError:
        return None
