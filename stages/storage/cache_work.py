"""Work on a cache that is not finished yet, below `_align` in its folder.

<plan key>/plan.json               the rows to score, and their shards
<plan key>/encoded/<slice>.arrow   the rows of a slice of the data; .json is the slice's record
<plan key>/commits/<shard>.json    the record of a finished shard
<plan key>/tmp/                    shards that are being written

A shard is durable before its record is written. The plan, the records and the manifest are created
only if absent, so the first of several writers counts.

A cache whose --output is in a bucket is made in a local folder of each machine. In the bucket, the
plan, the records and the manifest are created only if absent too. A shard is uploaded before its
record, and its local copy is removed once the record is in the bucket.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ... import __version__
from ...schemas.cache import FORMAT_VERSION, NOT_IN_ROOT, FileEntry, Manifest, Plan, Shard
from ...schemas.columns import is_valid
from ...schemas.errors import NonFiniteError, StorageError, UsageError
from ...schemas.json_codec import digest
from ...schemas.row_table import Rows
from ...schemas.rows import Rejected
from .cache import MANIFESTS, Cache
from .copies import work_folder
from .disk import fs
from .disk.locks import lock_of
from .locations import is_remote
from .output_folder import is_output, make_place, refuse_foreign
from .records import Records
from .shards import write_shard

if TYPE_CHECKING:
    from .remote import Remote

logger = logging.getLogger("align")

SHARD_NAME = re.compile(r"part-[0-9]{8}-[0-9a-f]{16}\.parquet")
WORK_NAME = re.compile(r"[0-9a-f]{16}")
PLAN_NAME = "plan.json"
TRASH = ".trash-"

PLANS = Records(
    Plan,
    remedy="Remove this file and run the same command again: no finished shard is lost.",
    format_version=FORMAT_VERSION,
)
SHARDS = Records(Shard, remedy="Remove this file and run the same command again.")
REJECTED = pa.schema(
    pa.field(name, pa.int64() if name == "row" else pa.string(), nullable=False)
    for name in ("file", "file_name", "row", "reason", "detail")
)


class CacheWork(Cache):
    """A cache and the work on it under one plan; with a URL, it is uploaded to a bucket."""

    def __init__(self, root: Path, plan_key: str, url: str = "") -> None:
        super().__init__(root)
        self.plan_key, self.url = plan_key, url
        self.work = self.private / plan_key[:16]
        assert WORK_NAME.fullmatch(self.work.name), plan_key
        self.plan = self.work / PLAN_NAME
        self.commits = self.work / "commits"
        self.encoded = self.work / "encoded"

    @staticmethod
    def at(output: str, plan_key: str) -> CacheWork:
        """The cache at an output; one in a bucket is made in a folder on this machine."""
        if is_remote(output):
            return CacheWork(work_folder(output), plan_key, output)
        return CacheWork(Path(output), plan_key)

    def __str__(self) -> str:
        return self.url or str(self.root)

    def shown(self, path: Path) -> str:
        """A path of the cache for messages: in the bucket, if the cache is made in one."""
        return f"{self}/{self._name(path)}"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    @property
    def remote(self) -> Remote:
        """The location in the bucket, of a cache that is made in one."""
        from .remote import Remote  # noqa: PLC0415 - its library takes a while to import

        return Remote(self.url)

    def prepare(self) -> None:
        """Makes the folders; refuses a folder with other content."""
        refuse_foreign(self.root, is_ours=self._is_ours, what="cache")
        if self.url:
            ours = {"manifest.json", "data", "rejected.parquet", "_align"}
            if foreign := {name.partition("/")[0] for name in self.remote.list()} - ours:
                raise UsageError(
                    f"{self} holds '{min(foreign)}' and is not a cache. Choose another --output."
                )
        make_place(self.root, self.private)
        fs.make_folder(self.data)
        fs.fsync(self.root)

    def _is_ours(self) -> bool:
        is_run = (self.root / "checkpoints").exists()
        ours = self.private.is_dir() or (self.manifest_file.is_file() and self.data.is_dir())
        return ours and not (is_run or is_output(self.private))

    def prepare_work(self) -> None:
        """Makes the folders of the work, after `prepare`."""
        fs.make_folder(self.work)
        fs.fsync(self.private)
        fs.make_folder(self.encoded)
        fs.make_folder(self.commits)
        fs.fsync(self.work)

    def put_plan(self, plan: Plan) -> Plan:
        """Stores the plan; returns another process's plan if that was first."""
        kept = PLANS.put(self.plan, plan)
        if self.url:
            self._share(self.plan)
            kept = PLANS.read(self.plan)
        return kept

    def find_plan(self) -> Plan | None:
        """The plan; None if there is none, or if another process is finishing the cache."""
        try:
            return PLANS.find(self.plan)
        except StorageError:
            if self.plan.exists():
                raise
            return None

    def _records(self) -> list[Path]:
        return sorted(self.commits.glob("[!.]*"))  # names with a dot are drafts

    def record(self, number: int) -> Path:
        """The path of a shard's record; if it exists, the shard is finished."""
        return self.commits / f"{number:08d}.json"

    def commit(
        self,
        number: int,
        rows: Rows,
        *,
        keys: tuple[str, str],
        rejected: Sequence[Rejected],
        notes: Mapping[str, int],
        numerics: Mapping[str, str],
    ) -> Shard:
        """Stores a scored shard, then its record; returns another process's record if it was first.

        `keys` are those of its first and last row; `rejected` are rows that could not be scored.
        """
        is_scored = is_valid(rows.of_completions.column("ref_logp"))
        bad = np.flatnonzero(is_scored & ~np.isfinite(rows.logps))
        if len(bad):
            raise NonFiniteError(
                f"shard {number}: {len(bad)} of {len(rows.logps)} log-probs are not finite, the "
                f"first of completion {bad[0]}. Check the weights; with float16, try "
                "--dtype bfloat16."
            )
        with self._draft(number) as draft:
            write_shard(draft, rows)
            sha256 = fs.sha256_of(draft)
            lost = sorted(rejected, key=lambda row: (row.file, row.row))
            ours = Shard(
                number=number,
                file=shard_name(number, sha256),
                bytes=draft.stat().st_size,
                sha256=sha256,
                rows=len(rows),
                branches=len(rows.completions),
                tokens=len(rows.completions.values),
                first_key=keys[0],
                last_key=keys[1],
                rejected=tuple(replace(row, detail=printable(row.detail)) for row in lost),
                reasons=dict(Counter(sorted(row.reason for row in lost))),
                notes=dict(notes),
                numerics=dict(numerics),
            )
            path = self.shard(ours)
            is_new = not path.exists()
            fs.fsync(draft)
            fs.rename(draft, path)
            fs.fsync(self.data)
        kept = SHARDS.put(self.record(number), ours)
        if kept is ours and self.url:
            self._share_shard(ours)
            kept = SHARDS.read(self.record(number))
        if kept.file != ours.file:
            logger.warning(
                "shard %d: another worker's is kept, this worker's has other bytes.", number
            )
            if is_new:  # else another process made it
                fs.unlink(path)
        return kept

    @contextmanager
    def _draft(self, number: int) -> Iterator[Path]:
        """A path for writing a shard that only its owner may read until it is moved."""
        drafts = self.work / "tmp"
        fs.make_folder(drafts, 0o700)
        draft = drafts / f"{number:08d}-{secrets.token_hex(8)}.parquet"
        try:
            yield draft
        finally:
            fs.discard(draft)

    def done(self, *, is_own: bool = True) -> dict[int, Shard]:
        """The records of the finished shards, by number.

        A record whose file is missing or short does not count. In the own work it is removed, so
        that the shard can be made again.
        """
        found = {}
        stored = self.remote.list("data") if self.url else {}
        for path in self._records():
            shard, size = SHARDS.read(path), -1
            if self.url and (there := stored.get(f"data/{shard.file}")):
                size = there.size
            elif not self.url:
                with suppress(FileNotFoundError):  # another worker may remove it first
                    size = self.shard(shard).stat().st_size
            if size == shard.bytes:
                found[shard.number] = shard
            elif is_own:
                where = self.shown(self.shard(shard))
                logger.warning("%s is missing or short: its rows are scored again.", where)
                SHARDS.drop(path)
                if self.url:
                    self.remote.delete([self._name(path)])
        return found

    # The end

    def build_manifest(self, plan: Plan, shards: Mapping[int, Shard]) -> Manifest:
        """Writes the list of rejected rows; returns the manifest of a plan and all of its shards.

        The same plan and shards give the same bytes.
        """
        assert sorted(shards) == plan.numbers, "a manifest needs every shard"
        made = [shards[number] for number in plan.numbers]
        names = {entry.identity: entry.name for entry in plan.inputs}
        places = {file: place for place, file in enumerate(names)}
        rejected = [*plan.rejected, *(row for shard in made for row in shard.rejected)]
        rejected.sort(key=lambda row: (places[row.file], row.row))
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            align_version=__version__,
            root="",
            model=plan.model,
            adapter=plan.adapter,
            plan_key=plan.plan_key,
            fingerprint=plan.fingerprint,
            reference_key=plan.reference_key,
            inputs=plan.inputs,
            rows_in=plan.rows_in,
            rows=sum(shard.rows for shard in made),
            branches=sum(shard.branches for shard in made),
            tokens=sum(shard.tokens for shard in made),
            shards=tuple(replace(shard, rejected=()) for shard in made),
            rejected=self.write_rejected(rejected, names),
            reasons=_total([plan.reasons, *(shard.reasons for shard in made)]),
            notes=_total([plan.notes, *(shard.notes for shard in made)]),
            sampling=plan.sampling,
        )
        return replace(manifest, root=digest(manifest, without=NOT_IN_ROOT))

    def write_rejected(
        self, rejected: Sequence[Rejected], names: Mapping[int, str]
    ) -> FileEntry | None:
        """Writes the rejected rows into one file; None without any."""
        if not rejected:
            return None
        columns = {
            "file": [f"{row.file:016x}" for row in rejected],
            "file_name": [printable(names[row.file]) for row in rejected],
            "row": [row.row for row in rejected],
            "reason": [row.reason for row in rejected],
            "detail": [printable(row.detail) for row in rejected],
        }
        path, sink = self.rejected, io.BytesIO()
        pq.write_table(
            pa.Table.from_pydict(columns, schema=REJECTED),
            sink,
            compression="zstd",
            compression_level=1,
            use_dictionary=["file", "file_name", "reason"],
            write_page_checksum=True,
        )
        content = sink.getvalue()
        fs.drop_drafts(path)
        fs.publish(path, content)
        if self.url:
            self.remote.put(self._name(path), path)
        # Not read from the file: another process that finishes the cache may remove it any time.
        sha256 = hashlib.sha256(content).hexdigest()
        return FileEntry(path.name, len(content), sha256, len(rejected))

    def finish(self, manifest: Manifest) -> bool:
        """Writes the manifest; False if the cache was finished with another manifest."""
        kept = MANIFESTS.put(self.manifest_file, manifest)
        if self.url:
            self._share(self.manifest_file)
            kept = MANIFESTS.read(self.manifest_file)
        return kept.root == manifest.root

    def tidy(self) -> bool:
        """Removes all work of a finished cache and the files that its manifest does not name.

        It is safe to repeat. Returns whether this process removed the work of its plan; only one of
        several processes does.
        """
        manifest = self.manifest()  # raises for an unfinished cache
        # The run that wrote the manifest may have died before its name was durable.
        fs.fsync(self.root)
        for path in (self.manifest_file, self.rejected):
            fs.drop_drafts(path)
        was_here = True
        if self.url:  # plans are deleted first, so that no other machine resumes the rest
            doomed = self._unneeded(manifest)
            plans = {name for name in doomed if name.endswith(f"/{PLAN_NAME}")}
            self.remote.delete(plans)
            self.remote.delete(doomed - plans)
            was_here = self._name(self.plan) in plans
        # Records are removed before their shards: a record must never name a missing shard.
        was_here = self.retire() and was_here
        for other in unfinished_work(self, self.url):
            other.retire()
        for path in sorted(self.private.glob(f"{TRASH}*")):  # also leftovers of killed runs
            fs.remove_tree(path)
        for path in sorted(self._files() - self._named(manifest)):
            fs.unlink(path)
        return was_here

    def is_tidy(self, manifest: Manifest) -> bool:
        """Whether `tidy` has nothing to do; reads only names."""
        if self.url and self._unneeded(manifest):
            return False
        names = {path.name for path in self.private.glob("*")}
        is_clean = names <= {lock_of(self.root).name, self.outbox.name}
        return is_clean and self._files() <= self._named(manifest)

    def retire(self) -> bool:
        """Renames the work, so that half of it never looks complete; whether this process did."""
        try:
            trash = f"{TRASH}{self.work.name}-{secrets.token_hex(4)}"
            fs.rename(self.work, self.work.with_name(trash))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False  # or another process was first
            raise
        return True

    def _files(self) -> set[Path]:
        shards = {path for path in self.data.glob("*") if SHARD_NAME.fullmatch(path.name)}
        return shards | ({self.rejected} if self.rejected.is_file() else set())

    def _named(self, manifest: Manifest) -> set[Path]:
        """The local files that stay; those of a cache in a bucket are in the bucket only."""
        if self.url:
            return set()
        return {*map(self.shard, manifest.shards), *([self.rejected] if manifest.rejected else [])}

    def _unneeded(self, manifest: Manifest) -> set[str]:
        """The objects of the bucket that a finished cache does not need."""
        named = {f"data/{shard.file}" for shard in manifest.shards} | {"manifest.json"}
        named |= {manifest.rejected.file} if manifest.rejected else set()
        return self.remote.list().keys() - named

    # The bucket

    def sync(self) -> None:
        """Exchanges records with the bucket, if there is one."""
        if not self.url:
            return
        remote = self.remote
        stored = remote.list().keys()
        if "manifest.json" in stored and (manifest := remote.get("manifest.json")) is not None:
            if not self.manifest_file.exists() or fs.read_bytes(self.manifest_file) != manifest:
                fs.publish(self.manifest_file, manifest)
            return
        fs.unlink(self.manifest_file)  # left by a cache that was removed from the bucket
        for other in unfinished_work(self, self.url):
            is_stored = self._name(other.plan) in stored
            if other.work != self.work and other.plan.is_file() and not is_stored:
                fs.remove_tree(other.work)

        # The records of this plan, and all plans: plans of other settings are refused later.
        records = f"{self._name(self.commits)}/"
        names = [one for one in stored if one.endswith(f"/{PLAN_NAME}") or one.startswith(records)]
        targets = {name: self.root / name for name in names}
        remote.fetch_all({name: path for name, path in targets.items() if not path.exists()})

        if self.plan.is_file() and self._name(self.plan) not in stored:
            self._share(self.plan)
        for path in self._records():
            shard = SHARDS.read(path)
            if self.shard(shard).exists():  # this machine made it but could not upload it
                self._share_shard(shard)
            elif self._name(path) not in stored:
                fs.unlink(path)

    def _share_shard(self, shard: Shard) -> None:
        """Uploads a shard, then its record; the first record in the bucket counts."""
        path = self.shard(shard)
        try:
            self.remote.put(self._name(path), path)
        except StorageError:
            if path.exists():
                raise  # else another process of this machine has uploaded it
        self._share(self.record(shard.number))
        fs.unlink(path)

    def _share(self, path: Path) -> None:
        """Creates a record in the bucket; an existing one replaces the local record."""
        remote, name = self.remote, self._name(path)
        if remote.put_new(name, fs.read_bytes(path)):
            return
        first = remote.get(name)
        fs.unlink(path)
        if first is None:
            raise StorageError(f"{self.shown(path)} was removed. Run the same command again.")
        fs.publish(path, first)


def unfinished_work(cache: Cache, url: str = "") -> list[CacheWork]:
    """The work of each plan that is in progress in the folder of a cache."""
    names = sorted(path.name for path in cache.private.glob("*"))
    return [CacheWork(cache.root, name, url) for name in names if WORK_NAME.fullmatch(name)]


def shard_name(number: int, sha256: str) -> str:
    """The name of a shard's file in `data`."""
    return f"part-{number:08d}-{sha256[:16]}.parquet"


def printable(text: str) -> str:
    """Text that UTF-8 can encode: lone surrogates are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _total(counts: list[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for count in counts for name in count})
    return {name: sum(count.get(name, 0) for count in counts) for name in names}
