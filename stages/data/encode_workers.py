"""Encodes chunks of input in as many processes as the machine has cores."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.forkserver import ensure_running
from pathlib import Path

from ...schemas.config import TokenOptions
from ...schemas.errors import BadDataError, FingerprintError
from ...schemas.row_keys import EncodedChunk, key_rows
from .data_schema import Shape
from .decode_rows import parse_chunk
from .encode import Encoder
from .input_files import Chunk
from .tokenizer import load_tokenizer, tokenizer_fingerprint

# Below this, starting processes costs more than they save.
SMALL_INPUT_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class EncodingJob:
    """All a process needs to know to encode chunks."""

    model: str
    options: TokenOptions
    shape: Shape
    seed: int
    files: tuple[int, ...]  # the identity of each input
    tokenizer: Mapping[str, str]  # its fingerprint, which each process that loads it must find


def encode_chunks(
    chunks: Iterable[Chunk], job: EncodingJob, *, num_workers: int
) -> Iterator[EncodedChunk]:
    """Encodes chunks in order; `num_workers` 0 stays in this process."""
    if num_workers == 0:
        worker = _Worker(job)
        yield from map(worker.encode, chunks)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    _start_server_ignoring_sigint()
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start, initargs=(job,)
    ) as pool:
        waiting: deque[Future[EncodedChunk]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode, chunk))
                if len(waiting) > 3 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise BadDataError(
                "A tokenizing process died, most likely for want of memory. "
                "Use fewer of them (--set data.workers=1) and look for very long rows."
            ) from error


def default_workers(input_bytes: int) -> int:
    """One process per usable core, unless the input is small."""
    return 0 if input_bytes < SMALL_INPUT_BYTES else usable_cores()


class _Worker:
    def __init__(self, job: EncodingJob) -> None:
        self._job = job
        tokenizer = load_tokenizer(job.model, job.options)
        self._is_same = tokenizer_fingerprint(tokenizer) == job.tokenizer
        self._encoder = Encoder(tokenizer, job.options)

    def encode(self, chunk: Chunk) -> EncodedChunk:
        if not self._is_same:
            raise FingerprintError(
                f"{self._job.model}: the tokenizer or its template changed after this run began. "
                "Run the same command again."
            )
        named = replace(chunk, file=self._job.files[chunk.file])
        with _collector_paused():
            records, rejected = parse_chunk(named, self._job.shape)
            encoded = self._encoder.encode(records)
            keyed = key_rows(encoded.rows, seed=self._job.seed, carried=self._job.shape.carried)
        return EncodedChunk(chunk.file, keyed, [*rejected, *encoded.rejected], dict(encoded.notes))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection: a chunk makes many objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_worker: _Worker | None = None


def _start(job: EncodingJob) -> None:
    global _worker  # noqa: PLW0603 - one encoder per process, made once
    # Each process keeps to one core; threads of the tokenizer would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Without a parent there is nothing left to do.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = _Worker(job)


def _start_server_ignoring_sigint() -> None:
    """Ignores Ctrl-C and hang-ups, which reach every process: the parent handles them."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set signals
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)
    }
    try:
        ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    assert _worker is not None
    return _worker.encode(chunk)


GROUPS = Path("sys/fs/cgroup")
OWN = Path("proc/self/cgroup")


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that the system and the quota of its group allow; at least one."""
    quotas = [math.ceil(quota) for quota in _quotas(root)]
    return max(1, min([_allowed_cores(), *quotas]))


def _allowed_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """In cores, of the group of this process and of every group around it."""
    for line in _read(root / OWN).splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for folder in _around(root / GROUPS, group):
                yield from _quota(*_read(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", controllers):
                for folder in _around(root / GROUPS / mount, group):
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    yield from _quota(*(_read(folder / name).strip() for name in names))


def _around(mount: Path, group: str) -> Iterator[Path]:
    """A group's folder and those above it; a container may see its own as the topmost."""
    folder = mount / group.lstrip("/")
    yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mount))


def _quota(*given: str) -> Iterator[float]:
    """Quota over period, both in microseconds; `max` and -1 mean no limit."""
    if len(given) == 2 and all(one.isdecimal() for one in given) and int(given[1]):
        yield int(given[0]) / int(given[1])


def _read(path: Path) -> str:
    """The text of a system file; empty if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
