"""Small caches that are made the way stage 1 makes them, without a model."""

import hashlib
import multiprocessing
import signal
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from align.schemas.cache import FORMAT_VERSION, InputEntry, Plan
from align.schemas.columns import Ragged, offsets_of
from align.schemas.row_table import Rows, sources
from align.schemas.rows import Rejected
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.disk.locks import owner_lock
from support import disk_faults

FACTS = {"keys": ("00", "ff"), "rejected": (), "notes": {}, "numerics": {"path": "exact"}}
NAMES = {0: "a.jsonl", 1: "b.jsonl"}
LOSSY = FACTS | {"rejected": (Rejected(0, 9, "oom", "too big"),), "notes": {"swaps": 2}}
ROWS = 5
KILLED = -signal.SIGKILL
FORK = multiprocessing.get_context("fork")


def block_of(rows, seed, *, max_tokens=6, token_logps=False, carried=(), scores=False):
    """Random rows; prompts and completions may be empty, and a row may have no completion."""
    draw = np.random.default_rng(seed)
    completion_offsets = offsets_of(draw.integers(0, 4, rows))
    num_completions = int(completion_offsets[-1])
    tokens = offsets_of(draw.integers(0, max_tokens, num_completions))
    prompts = offsets_of(draw.integers(0, max_tokens, rows))
    given = draw.standard_normal(num_completions)
    keys = np.random.default_rng([seed, rows])
    ids, copies = draw.bytes(16 * rows).hex(), draw.integers(0, 3, rows).tolist()
    ids = [ids[32 * row : 32 * row + 32] for row in range(rows)]
    files = draw.integers(0, 9, rows).astype(np.uint64) << np.uint64(60)
    of_rows = {
        "row_id": [
            f"{name}-{copy}" if copy else name for name, copy in zip(ids, copies, strict=True)
        ],
        "source": sources(files.tolist(), draw.integers(0, 2**40, rows)),
        "prompt_key": np.frombuffer(keys.bytes(16 * rows), dtype="S16"),
        "split_key": np.frombuffer(keys.bytes(8 * rows), dtype=np.uint64),
        "prompt_ids": Ragged(draw.integers(0, 2**31 - 1, prompts[-1]).astype(np.int32), prompts),
        "prompt_cut": draw.integers(0, 3, rows),
        **{name: draw.standard_normal(rows) for name in carried},
    }
    of_completions = {
        "completion_ids": Ragged(draw.integers(0, 2**31 - 1, tokens[-1]).astype(np.int32), tokens),
        "role": draw.integers(0, 6, num_completions),
        "score": np.where(draw.random(num_completions) < scores, given, np.nan),
        "cut": draw.integers(0, 3, num_completions),
        "ref_logp": -draw.random(num_completions) * 50,
        "completion_turns": pa.nulls(num_completions, pa.large_binary()),
    }
    if token_logps:
        kept = draw.standard_normal(tokens[-1]).astype(np.float32)
        of_completions["ref_token_logps"] = Ragged(kept, tokens)
    return Rows.of(of_rows, of_completions, completion_offsets)


def plan_of(seeds):
    """The plan of a cache whose shards are drawn of these seeds."""
    return Plan(
        format_version=FORMAT_VERSION,
        plan_key=hashlib.sha256(str(seeds).encode()).hexdigest(),
        fingerprint={"seeds": str(seeds)},
        reference_key="0" * 64,
        model="/model",
        adapter="",
        inputs=(InputEntry("a.jsonl", 1, "0" * 64, ROWS * len(seeds)),),
        rows_in=ROWS * len(seeds),
        shards=(ROWS,) * len(seeds),
        rejected=(),
        reasons={},
        notes={"repeats": 1},
        reuse=(),
        threads=1,
        sampling=(),
    )


def commit_blocks(root, blocks, facts=None):
    """A cache with a shard of each block, and the record of each."""
    cache = CacheWork(root, "0" * 64)
    cache.prepare()
    cache.prepare_work()
    facts = facts or [FACTS] * len(blocks)
    numbered = enumerate(zip(blocks, facts, strict=True))
    return cache, [cache.commit(number, block, **own) for number, (block, own) in numbered]


def make_cache(root, seeds=(1, 2, 3)):
    """Makes or goes on making a cache."""
    plan = plan_of(seeds)
    cache = CacheWork(root, plan.plan_key)
    is_done = cache.manifest_file.exists() and cache.manifest().plan_key == plan.plan_key
    if not is_done:
        cache.prepare()
    with owner_lock(cache.root, "run"):
        if not is_done:
            _make(cache, plan, seeds)
        cache.tidy()


def _make(cache, plan, seeds):
    cache.prepare_work()
    stored = cache.find_plan()
    if stored is None:
        lost = (Rejected(0, 7, "null", "no prompt"),)
        plan = replace(plan, rows_in=plan.rows_in + 1, rejected=lost, reasons={"null": 1})
        stored = cache.put_plan(plan)
    shards = cache.done()
    for number in sorted({*range(len(seeds))} - {*shards}):
        shards[number] = cache.commit(number, block_of(ROWS, seeds[number]), **LOSSY)
    cache.finish(cache.build_manifest(stored, shards))


def tree_of(root):
    """Every file below a folder, by its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def in_child(work):
    """The exit code of a forked process that does `work`, and may kill itself."""
    return at_once(1, lambda _: work())[0]


def states_of_kills(prepare, work, look):
    """What is left of work that is killed before each of its operations on the disk, in order.

    `prepare` lays out what was there before, and `look` says what is there then.
    """
    seen, number, code = [], 1, KILLED
    while code:
        prepare()
        code = in_child(partial(_killed_before, number, work))
        assert code in (0, KILLED)
        seen.append(look())
        number += 1
    return [state for at, state in enumerate(seen) if state not in seen[:at]]


def _killed_before(number, work):
    disk_faults.arm(f"before:*=kill@{number}")
    work()


def at_once(count, work):
    """The exit codes of so many forked processes, which get their numbers and begin at once."""
    gate = FORK.Barrier(count)
    children = [
        FORK.Process(target=lambda number: (gate.wait(), work(number)), args=(number,))
        for number in range(count)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for child in children:
            child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]
