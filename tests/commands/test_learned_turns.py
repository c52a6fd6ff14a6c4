"""Caches of completions of several messages: their sums, their reuse, and what is said of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.pipeline.precompute.verify import verify_files
from align.schemas.data_options import DataOptions
from align.schemas.errors import FingerprintError, UsageError
from align.schemas.rows import Role
from align.stages.report.cache_summary import render, summarize
from align.stages.report.export_trl import export_trl, scan_trl
from align.stages.storage.cache import Cache
from support.read_rows import bot, user, write_rows
from support.refusals import refuses
from support.stage_one import contents, run

ROWS = 24
SEVERAL = range(0, ROWS, 3)  # these rows have a chosen answer of two turns


def rows_of_turns(several=SEVERAL):
    for row in range(ROWS):
        first, again = bot(f"A{'b' * row} c"), [user("and?"), bot(f"D {row}")]
        yield {
            "prompt": [user(f"Question {row}?")],
            "chosen": [first, *again] if row in several else [first],
            "rejected": [bot(f"E {row}")],
        }


@pytest.fixture
def turns(to, tmp_path):
    """The config of a cache of such rows."""

    def prepare(name, *, several=SEVERAL, learn="assistant", **cache):
        path = tmp_path / f"{len(several)}.jsonl"
        write_rows(path, list(rows_of_turns(several)))
        config = to(output=str(tmp_path / name), **cache)
        tokens = replace(config.tokens, learn=learn)
        return replace(config, data=DataOptions(files=[str(path)]), tokens=tokens)

    return prepare


def stored(config):
    paths = sorted(Path(config.cache.output, "data").iterdir())
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def turns_of(row):
    """The turn of each token; a shard has none where every completion is one turn."""
    return row.get("completion_turns") or [[1] * count for count in row["num_tokens"]]


def completions_of(config):
    for row in stored(config):
        turns = turns_of(row)
        for completion, ids in enumerate(row["completion_ids"]):
            told = (tuple(row["prompt_ids"]), tuple(ids), tuple(turns[completion]))
            yield told, row["ref_logp"][completion], row["ref_token_logps"][completion]


def test_sums_are_of_what_is_learned_and_partners_bring_that_along(turns):
    config = turns("cache")
    assert verify_files(Cache(Path(config.cache.output)) if run(config) else None)
    own, mismatched = {}, {}
    for row in stored(config):
        for ids, role, each in zip(row["completion_ids"], row["role"], turns_of(row), strict=True):
            (mismatched if role == 5 else own).setdefault(tuple(ids), each)
    assert all(own[ids] == each for ids, each in mismatched.items())
    assert any(min(each) < 1 for each in mismatched.values())
    assert sum(min(turns) < 1 for turns in own.values()) == len(SEVERAL)
    for (_, _, numbers), total, tokens in completions_of(config):
        learned = [one for one, number in zip(tokens, numbers, strict=True) if number > 0]
        assert total == pytest.approx(np.sum(np.array(learned, np.float64)), rel=1e-12)


def test_nothing_is_reused_across_what_is_learned(turns):
    """Completions of one turn are, and those of several turns where the same turns are learned."""
    first = turns("first")
    run(first)
    known = {completion for completion, *_ in completions_of(first)}
    caches = {learn: turns(f"own-{learn}", learn=learn) for learn in ("assistant", "last", "all")}
    for learn, own in caches.items():
        run(own)
        other = turns(f"reusing-{learn}", learn=learn, reuse=[first.cache.output])
        outcome = run(other)
        assert [each[:2] for each in completions_of(other)] == [
            each[:2] for each in completions_of(own)
        ]
        new = {completion for completion, *_ in completions_of(own)} - known
        assert outcome.counts.scored == len(new)
        assert bool(new) == (learn != "assistant")


def test_a_cache_of_every_token_does_not_become_one_of_turns(turns):
    whole = turns("cache", learn="all")
    run(whole)
    kept = contents(whole.cache.output)
    for learn in ("assistant", "last"):
        with refuses(FingerprintError, "tokens.learn", "--output"):
            run(turns("cache", learn=learn))
    assert contents(whole.cache.output) == kept
    run(turns("other"))
    with refuses(FingerprintError, "tokens.learn"):
        run(turns("other", learn="last"))


def test_the_root_of_a_cache_of_single_turns_knows_no_choice(turns):
    roots = {run(turns(learn, several=(), learn=learn)).manifest.root for learn in ("last", "all")}
    single = turns("cache", several=())
    roots.add(run(single).manifest.root)
    assert len(roots) == 1
    assert "completion_turns" not in stored(single)[0]


def test_the_learned_tokens_of_a_cache_are_counted_by_role(turns):
    config = turns("cache", several=range(ROWS))
    run(config)
    counts = dict.fromkeys(("chosen", "rejected", "mismatched"), 0)
    for row in stored(config):
        for role, numbers in zip(row["role"], row["completion_turns"], strict=True):
            counts[Role(role).name.lower()] += sum(number > 0 for number in numbers)
    summary = summarize(Cache(Path(config.cache.output)))
    assert {name: role["learned"] for name, role in summary["roles"].items()} == counts
    assert f"{sum(counts.values()):,} of these tokens" in render(summary)


def test_sums_over_turns_are_not_given_to_trainers_that_sum_over_all(turns, tmp_path):
    config = turns("cache")
    run(config)
    folder, target = Cache(Path(config.cache.output)), tmp_path / "trl.parquet"
    for export in (lambda: export_trl(folder, target, decode=str), lambda: scan_trl(folder)):
        with refuses(UsageError, "tokens.learn=all"):
            export()
    assert not target.exists()
