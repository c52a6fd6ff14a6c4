"""Scores tokenized rows with the reference, one shard at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.columns import Ragged, offsets_of
from ...schemas.row_table import Rows, bytes_of
from ...schemas.rows import OutOfMemory, Rejected, Role, Scorer, Tree, sums_of_completions
from .batch_plan import TreeCost, TreePlan, plan_batches, plan_trees

logger = logging.getLogger("align")


@dataclass(frozen=True)
class KnownScores:
    """The scores that earlier caches have; a completion without `found` has no tokens."""

    found: NDArray[np.bool_]  # (completions,)
    token_logps: Ragged | None  # (completions,) float32; None when the earlier cache has sums only
    logps: NDArray[np.float64]  # (completions,)
    numerics: dict[str, str]  # of the earlier cache


@dataclass(frozen=True)
class ShardScores:
    """A scored shard, its batch size, and the rows that could not be scored."""

    block: Rows
    tokens_per_batch: int
    completions: int
    reused: int  # copied from an earlier cache, or from equal completions of this shard
    padding: int  # tokens of padding run through the model
    run_tokens: int  # tokens run through the model, padding included
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class BatchDone:
    """The progress of one batch that was run through the model."""

    share: float  # fraction of the shard's tokens that have to be scored
    tokens: int  # padding included
    padding: int


@dataclass(frozen=True)
class ScoringRules:
    """The settings of scoring."""

    tokens_per_batch: int
    hidden_size: int
    keep_token_logps: bool


def score_shard(
    rows: Rows,
    known: KnownScores,
    rules: ScoringRules,
    *,
    scorer: Callable[[], Scorer],
    on_batch: Callable[[BatchDone], None],
) -> ShardScores:
    """Scores a shard and reuses known scores; `on_batch` is called after each batch.

    Each shard starts with the full budget, so its bits do not depend on other shards' memory.
    """
    budget = rules.tokens_per_batch
    alike = first_alike(rows, np.flatnonzero(~known.found))
    while True:
        try:
            run = _run(rows, np.unique(alike), rules, budget, scorer=scorer, on_batch=on_batch)
            break
        except OutOfMemory as refusal:
            budget = max(budget // 2, 1)
            logger.warning("Out of memory (%s): again with %d tokens per batch.", refusal, budget)
    return _collect(rows, known, alike, _spoilt_again(rows, run, scorer), rules)


def unscored(rows: Rows) -> ShardScores:
    """A shard with null log-probs, for methods that need no reference."""
    none = pa.nulls(len(rows.completions), pa.float64())
    return ShardScores(rows.with_columns(ref_logp=none), 0, 0, 0, 0, 0, ())


@dataclass(frozen=True)
class _Run:
    indices: NDArray[np.int64]  # of the completions that were run
    token_logps: Ragged  # of each of them
    padding: int
    tokens: int
    tokens_per_batch: int
    too_big: tuple[int, ...]  # completions that do not fit even alone; their log-probs are NaN


def _run(
    rows: Rows,
    wanted: NDArray[np.int64],
    rules: ScoringRules,
    budget: int,
    *,
    scorer: Callable[[], Scorer],
    on_batch: Callable[[BatchDone], None],
) -> _Run:
    trees = _plan(rows, wanted, TreeCost(rules.hidden_size, budget))
    # Opening the scorer loads a model, so it is skipped if there is nothing to score.
    pads = bool(trees) and scorer().pads
    results: list[tuple[int, NDArray[np.float32]]] = []
    too_big: list[int] = []
    padding = tokens = 0
    whole = sum(tree.length for tree in trees)
    batches = plan_batches([tree.length for tree in trees], budget, pads=pads)
    launches = (_launched(rows, [trees[index] for index in batch], scorer()) for batch in batches)
    for batch in _with_next_launched(launches):
        results += _values(rows, batch)
        too_big += [] if batch.read else batch.indices
        waste = batch.padding if pads else 0
        tokens, padding = tokens + batch.useful + waste, padding + waste
        on_batch(BatchDone(batch.useful / whole, batch.useful + waste, waste))
    results.sort(key=lambda result: result[0])
    lists = [logps for _, logps in results]
    return _Run(wanted, Ragged.of(lists, np.float32), padding, tokens, budget, tuple(too_big))


def _spoilt_again(rows: Rows, run: _Run, scorer: Callable[[], Scorer]) -> _Run:
    """Runs each completion with a log-prob that is not finite once more, alone.

    A kernel may spread a neighbour's NaN: FlexAttention multiplies masked values by 0, and 0 times
    NaN is NaN.
    """
    too_big, tokens = run.too_big, run.tokens
    is_spoilt = ~np.isfinite(_sums(rows, run)) & ~np.isin(run.indices, too_big)
    for index in np.flatnonzero(is_spoilt).tolist():
        completion = int(run.indices[index])
        row = int(rows.row_of_completion[completion])
        length = int(rows.prompts.lengths[row] + rows.completions.lengths[completion])
        batch = _launched(rows, [TreePlan(row, (completion,), length)], scorer())
        ((_, alone),) = _values(rows, batch)
        run.token_logps[index][:] = alone
        too_big, tokens = too_big + (() if batch.read else (completion,)), tokens + length
    return replace(run, tokens=tokens, too_big=too_big)


def _sums(rows: Rows, run: _Run) -> NDArray[np.float64]:
    """The sum over learned tokens of each completion that was run."""
    is_learned = None if rows.learned is None else rows.learned.take(run.indices).values > 0
    return sums_of_completions(run.token_logps, is_learned)


def _plan(rows: Rows, wanted: NDArray[np.int64], cost: TreeCost) -> list[TreePlan]:
    groups: dict[int, list[int]] = {}
    prompts = prompt_numbers(rows)[rows.row_of_completion[wanted]]
    for prompt, completion in zip(prompts.tolist(), wanted.tolist(), strict=True):
        groups.setdefault(prompt, []).append(completion)
    return plan_trees(
        (groups[prompt] for prompt in sorted(groups)),
        rows.row_of_completion,
        prompt_lengths=rows.prompts.lengths,
        completion_lengths=rows.completions.lengths,
        cost=cost,
    )


@dataclass(frozen=True)
class _Batch:
    """A launched batch."""

    trees: Sequence[TreePlan]
    read: Callable[[], NDArray[np.float32]] | None  # waits for log-probs; None: it does not fit

    @property
    def indices(self) -> list[int]:
        return [index for tree in self.trees for index in tree.branches]

    @property
    def useful(self) -> int:
        return sum(tree.length for tree in self.trees)

    @property
    def padding(self) -> int:
        return max(tree.length for tree in self.trees) * len(self.trees) - self.useful


def _launched(rows: Rows, trees: Sequence[TreePlan], scorer: Scorer) -> _Batch:
    given = [
        Tree(rows.prompts[tree.row], tuple(rows.completions[index] for index in tree.branches))
        for tree in trees
    ]
    try:
        return _Batch(trees, scorer.launch(given))
    except OutOfMemory:
        if len(trees) > 1 or len(trees[0].branches) > 1:
            raise
        return _Batch(trees, None)


BATCHES_AHEAD = 1  # one keeps a GPU busy; more would only hold more inputs in memory


def _with_next_launched(launches: Iterator[_Batch]) -> Iterator[_Batch]:
    """Each batch, once the next one is launched: the GPU computes while a batch is read."""
    waiting: deque[_Batch] = deque()
    for batch in launches:
        waiting.append(batch)
        if len(waiting) > BATCHES_AHEAD:
            yield waiting.popleft()
    yield from waiting


def _values(rows: Rows, batch: _Batch) -> list[tuple[int, NDArray[np.float32]]]:
    """Waits for the log-probs of each completion."""
    completions = batch.indices
    offsets = offsets_of(rows.completions.lengths[completions])
    flat = batch.read() if batch.read else np.full(offsets[-1], np.nan, np.float32)
    assert offsets[-1] == len(flat)
    return [
        (completion, flat[offsets[index] : offsets[index + 1]])
        for index, completion in enumerate(completions)
    ]


def _collect(
    rows: Rows,
    known: KnownScores,
    alike: NDArray[np.int64],
    run: _Run,
    rules: ScoringRules,
) -> ShardScores:
    wanted = np.flatnonzero(~known.found)
    index = np.searchsorted(run.indices, alike)
    logps = known.logps.copy()
    logps[wanted] = _sums(rows, run)[index]
    scored = rows.with_columns(ref_logp=logps)
    if rules.keep_token_logps:
        assert known.token_logps is not None
        parts = Ragged.concat([known.token_logps, run.token_logps])
        source = np.arange(len(logps))
        source[wanted] = len(logps) + index
        scored = scored.with_columns(ref_token_logps=parts.take(source))
    bad_rows = np.unique(rows.row_of_completion[~np.isfinite(logps)])
    if len(bad_rows):
        scored = scored.take(np.setdiff1d(np.arange(len(rows)), bad_rows))
    return ShardScores(
        block=scored,
        tokens_per_batch=run.tokens_per_batch,
        completions=len(known.found),
        reused=len(logps) - len(run.indices),
        padding=run.padding,
        run_tokens=run.tokens,
        rejected=_rejected(rows, logps, wanted[np.isin(alike, run.too_big)]),
    )


def _rejected(
    rows: Rows, logps: NDArray[np.float64], too_big: NDArray[np.int64]
) -> tuple[Rejected, ...]:
    """The rows without a finite log-prob, each once; memory comes before NaN as the reason."""
    row_of_completion = rows.row_of_completion
    found: dict[int, Rejected] = {}
    for completion in too_big.tolist():
        row = int(row_of_completion[completion])
        tokens = int(rows.prompts.lengths[row] + rows.completions.lengths[completion])
        why = f"the prompt and {_named(rows, completion)}, {tokens} tokens, do not fit even alone"
        found.setdefault(row, _reject(rows, row, "oom", why))
    for completion in np.flatnonzero(~np.isfinite(logps)).tolist():
        row = int(row_of_completion[completion])
        why = f"the log-prob of {_named(rows, completion)} is not finite: {logps[completion]}"
        found.setdefault(row, _reject(rows, row, "nonfinite_logp", why))
    return tuple(found[row] for row in sorted(found))


def _reject(rows: Rows, row: int, reason: str, detail: str) -> Rejected:
    return Rejected(int(rows.file[row]), int(rows.row[row]), reason, detail)


def _named(rows: Rows, completion: int) -> str:
    index = completion - int(rows.completion_offsets[rows.row_of_completion[completion]])
    return f"completion {index} ({Role(rows.roles[completion]).name.lower()})"


def first_alike(rows: Rows, completions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of `completions` with the same prompt, completion and turns, for each of them."""
    lengths = rows.completions.lengths[completions]
    prompts = prompt_numbers(rows)[rows.row_of_completion[completions]]
    # Only completions that share a prompt and a length are compared by their ids.
    pairs = prompts * (lengths.max(initial=0) + 1) + lengths
    _, kind, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    first = completions.copy()
    seen: dict[tuple[int, bytes], int] = {}
    for index in np.flatnonzero(counts[kind] > 1).tolist():
        completion = int(completions[index])
        turns = None if rows.learned is None else rows.learned[completion]
        content = bytes_of(rows.completions[completion].tobytes(), turns)
        first[index] = seen.setdefault((int(prompts[index]), content), completion)
    return first


def prompt_numbers(rows: Rows) -> NDArray[np.int64]:
    """A number for each row's prompt, equal for equal token ids."""
    seen: dict[bytes, int] = {}
    ids, ends = rows.prompts.values.tobytes(), rows.prompts.offsets * rows.prompts.values.itemsize
    spans = pairwise(ends.tolist())  # cheaper than an array for each of many short prompts
    numbers = (seen.setdefault(ids[start:end], len(seen)) for start, end in spans)
    return np.fromiter(numbers, dtype=np.int64, count=len(rows))
