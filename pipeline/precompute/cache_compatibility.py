"""The fingerprint of a cache, and which earlier caches it may grow from or reuse scores of.

A cache that grows in place keeps every score, and every file that a training still reads.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import FORMAT_VERSION, Commit, Manifest, Plan
from ...schemas.config import CacheOptions, Config
from ...schemas.errors import AlignError, FingerprintError, OlderFormatError, UsageError
from ...schemas.rows import Role, RowBlock
from ...stages.score.reuse import EarlierCache, look_up
from ...stages.sort.sorted_rows import SortedRows
from ...stages.storage.bucket.objects import Location, location
from ...stages.storage.cache.cache_folder import CacheFolder, WorkFolder
from ...stages.storage.cache.cleanup import Superseded, remove_superseded, superseded
from ...stages.storage.cache.commits import read_commits
from ...stages.storage.cache.manifest_file import PLANS, load_manifest
from ...stages.storage.cache.shards import iter_row_groups, parse_row_ids, read_shard
from ...stages.storage.disk.digest_memory import user_folder
from ...stages.storage.disk.locks import owner_lock
from ..jobs.differences import differences
from ..options.declared import bound
from ..options.settings import flatten

logger = logging.getLogger("align")

KL_PAIRS = "cache.kl_pairs"
FILES = "data.files"
# Of the first rows: what is added may be the first that has any.
TOOLS = "tool_calls"  # are converted; once they were rendered as given
CELLS = "data.max_cell_mib"  # rows that were too large may be used; kept only if it says more
LEARN = "tokens.learn"  # of completions of several messages; once every token was learned
# A cache may grow in place along these; along all others it would become another cache.
GROWS_ALONG = {FILES, KL_PAIRS, TOOLS, LEARN, CELLS}


def fingerprint(
    config: Config,
    *,
    files: str,
    shape: str,
    tokenizer: Mapping[str, str],
    model: Mapping[str, str],
    rendering: Mapping[str, str],
) -> dict[str, str]:
    """Everything that the bytes of the cache depend on, by name."""
    wrap, settings = config.data.wrap, flatten(config)
    return {
        "format": str(FORMAT_VERSION),
        FILES: files,
        "data.shape": shape,
        **({"data.wrap": wrap} if wrap == "chat" else {}),  # the others leave text as it is
        **rendering,
        **tokenizer,
        **{name: _text(settings[name]) for name in bound(settings, "cache")},
        **model,
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def require_same_or_growing(
    stored: Mapping[str, str], wanted: Mapping[str, str], *, where: str
) -> None:
    """Refuses settings that would make it another cache."""
    found = differences(stored, wanted)
    shrinks = KL_PAIRS in found and int(wanted[KL_PAIRS]) < int(stored[KL_PAIRS])
    learns_else = LEARN in found and LEARN in stored
    if set(found) <= GROWS_ALONG and not shrinks and not learns_else:
        return
    lines = "\n  ".join(found.values())
    cost = "scores both caches need are copied, not computed again"
    if {name.partition(".")[0] for name in found} & {"model", "numerics"}:
        cost = "the reference differs, so everything is scored again there"
    raise FingerprintError(
        f"{where} was made with other settings. What differs:\n  {lines}\n"
        f"Choose another --output ({cost}), or undo the change."
    )


ROWS_AT_ONCE = 4096


def require_growth(
    folder: CacheFolder, manifest: Manifest, ring: SortedRows, *, long_form: bool
) -> None:
    """Refuses to grow a cache that holds rows which the new data lack.

    A prompt of long-form data that gained a completion is another row, with the old branches; what
    its completions share may have become less, so a branch is known by its prompt and all its ids.
    """
    stored = _branches if long_form else _rows
    lost = total = 0
    for shard in manifest.shards:
        names = stored(folder.shard(shard))
        is_lost = np.ones(len(names), dtype=np.bool_)
        for present in _in_ring(ring, shard, names, long_form=long_form):
            is_lost &= ~look_up(np.sort(present), names)[1]
        lost, total = lost + int(is_lost.sum()), total + len(names)
    if lost:
        what = "completions" if long_form else "rows"
        raise FingerprintError(
            f"{folder.root} was made from other data, or by a version of align that rendered them "
            f"otherwise: {lost} of its {total} {what} are not in the data any more. Choose "
            "another --output; scores both caches need are copied, not computed again."
        )


def gone_without(folder: CacheFolder) -> Superseded:
    """The files that `remove_earlier` would remove."""
    return superseded(folder, load_manifest(folder))


def remove_earlier(folder: CacheFolder) -> None:
    """Removes from a cache that has grown what it no longer uses."""
    load_manifest(folder)
    with owner_lock(folder, uuid.uuid4().hex[:12]):
        if works := folder.works():
            raise UsageError(
                f"{works[0].root} is an unfinished run, whose shards may be in use. Give its "
                "command again, or delete that folder, then run align gc again."
            )
        remove_superseded(folder)


def _in_ring(
    ring: SortedRows, shard: Commit, names: NDArray[np.bytes_], *, long_form: bool
) -> Iterator[NDArray[np.bytes_]]:
    """The rows of the ring in the range of a shard, as the shard names them, some at a time."""
    # One prompt may fill many shards; its rows are in the order of their ids.
    digests = np.sort(names.astype("S16"))
    ids = None if long_form or not len(names) else (digests[0], digests[-1])
    parts: list[NDArray[np.bytes_]] = []
    count = 0
    for keyed in ring.within(int(shard.first_key, 16), int(shard.last_key, 16), ids=ids):
        rows = keyed.rows
        parts.append(_named_branches(rows) if long_form else _named(rows.row_id, rows.copy))
        count += len(rows)
        if count >= ROWS_AT_ONCE:
            yield np.concatenate(parts)
            parts, count = [], 0
    if parts:
        yield np.concatenate(parts)


def _rows(path: Location) -> NDArray[np.bytes_]:
    """The rows of a shard."""
    parts = [np.empty(0, dtype="S20")]
    for table in iter_row_groups(path, ["row_id"]):
        parts += [_named(*parse_row_ids(ids, str(path))) for ids in table["row_id"].chunks]
    return np.concatenate(parts)


def _named(digests: NDArray[np.bytes_], copies: NDArray[np.int32]) -> NDArray[np.bytes_]:
    """Digest and copy of each row as one S20."""
    names = np.empty(len(digests), dtype=[("digest", "S16"), ("copy", ">i4")])
    names["digest"], names["copy"] = digests, copies
    return names.view("S20")


def _branches(path: Location) -> NDArray[np.bytes_]:
    """The branches of a shard but the mismatched, which are chosen again for new data."""
    rows = read_shard(path).rows
    names: NDArray[np.bytes_] = _named_branches(rows)[rows.roles != Role.MISMATCHED]
    return names


def _named_branches(rows: RowBlock) -> NDArray[np.bytes_]:
    """A digest of each branch that does not depend on where its prompt ends, as S16."""
    keys = np.ascontiguousarray(rows.prompt_keys.prompt).tobytes()  # 16 bytes each
    starts = range(0, len(keys), 16)
    own = zip(starts, rows.prompts, strict=True)
    prompts = [keys[start : start + 16] + ids.tobytes() for start, ids in own]
    branches = zip(rows.row_of_branch.tolist(), rows.completion_bytes(), strict=True)
    names = [blake2b(prompts[row] + told, digest_size=16) for row, told in branches]
    return np.frombuffer(b"".join(name.digest() for name in names), dtype="S16")


def candidates(options: CacheOptions, folder: CacheFolder) -> tuple[str, ...]:
    """Folders to search: the output, those the user names, those in the registry."""
    for name in options.reuse:
        if not CacheFolder(location(name)).manifest.is_file():
            raise UsageError(f"{name}: no finished cache to reuse (--reuse). Check the path.")
    known = filter(_is_there, _lines()) if options.reuse_known else ()
    named = [str(location(name).resolve()) for name in [*options.reuse, *known]]
    return tuple(dict.fromkeys([str(folder.root.resolve()), *named]))


def open_earlier(folders: Sequence[str], plan: Plan) -> list[EarlierCache]:
    """The readable caches among the folders that the same reference scored."""
    earlier: list[EarlierCache] = []
    older: list[Location] = []
    for folder in (CacheFolder(location(name)) for name in folders):
        with _passed_over(folder.root, older):
            earlier += _finished(folder, plan)
        with _passed_over(folder.private, older):
            for work in folder.works():
                with _passed_over(work.root, older):
                    earlier += _begun(work, plan)
    if older:
        logger.warning(
            "%d earlier caches were made by an older align and are not reused: %s. `align inspect` "
            "prints the command that makes one again.",
            len(older),
            ", ".join(map(str, older)),
        )
    return earlier


def may_have_scores(folders: Sequence[str], reference_key: str) -> bool:
    """Whether one of the folders is of this reference; nothing is said of those that are broken."""
    for folder in (CacheFolder(location(name)) for name in folders):
        with suppress(AlignError, OSError):
            if folder.manifest.is_file() and load_manifest(folder).reference_key == reference_key:
                return True
        with suppress(AlignError, OSError):
            plans = [PLANS.find(work.plan) for work in folder.works()]
            if any(plan and plan.reference_key == reference_key for plan in plans):
                return True
    return False


def register_cache(folder: CacheFolder) -> None:
    """Adds a finished cache to this user's registry, unless it is in a store."""
    if not folder.store.is_near:
        return
    path = _list_of_caches()
    try:
        root = str(folder.root.resolve())
        if root in _lines():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as lines:
            lines.write(f"{root}\n")
    except (OSError, UnicodeError) as error:  # the cache is published: nothing may fail now
        logger.warning("%s: %s was not added: %s", path, folder.root, error)


@contextmanager
def _passed_over(root: Location, older: list[Location]) -> Iterator[None]:
    """Logs a cache that cannot be read, and continues without it."""
    try:
        yield
    except OlderFormatError:
        older.append(root)
    except (AlignError, OSError) as error:
        logger.warning("%s is not reused: %s", root, error)


def _finished(folder: CacheFolder, plan: Plan) -> list[EarlierCache]:
    # The output itself, which has the work of this plan, need not be finished; the others were.
    if not folder.manifest.is_file() and folder.work(plan.plan_key).root.is_dir():
        return []
    manifest = load_manifest(folder)
    if not _alike(manifest, plan):
        return []
    same = _same_ring(manifest.fingerprint, plan.fingerprint)
    return [EarlierCache(folder, manifest.shards, same)]


def _begun(work: WorkFolder, plan: Plan) -> list[EarlierCache]:
    other = PLANS.find(work.plan)
    if other is None or other.plan_key == plan.plan_key or not _alike(other, plan):
        return []
    commits = read_commits(work, len(other.unit_offsets) - 1)
    same = _same_ring(other.fingerprint, plan.fingerprint)
    return [EarlierCache(work.cache, tuple(commits.values()), same)]


def _alike(other: Manifest | Plan, plan: Plan) -> bool:
    return other.reference_key == plan.reference_key


def _same_ring(first: dict[str, str], second: dict[str, str]) -> bool:
    return first["cache.seed"] == second["cache.seed"]


def _lines() -> list[str]:
    path = _list_of_caches()
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line]


def _is_there(line: str) -> bool:
    try:
        return CacheFolder(Path(line)).manifest.is_file()
    except OSError:  # the line is not a path
        return False


def _list_of_caches() -> Path:
    return user_folder() / "caches.txt"
