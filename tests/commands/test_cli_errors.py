"""What a person gets wrong: one message, the right exit code, a way on, and no file of his gone."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.options.settings import load_settings
from align.pipeline.tables.score_rewards import write_rewarded
from align.schemas.config import ModelOptions, TrackingOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Role, TextRow
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.output_folder import OutputFolder
from align.stages.storage.run.run_folder import RunFolder
from align.stages.storage.tables import TableFolder
from support import stage_one
from support.command import align, refusal, success
from support.refusals import refuses
from support.stub_reference import Liar

pytestmark = pytest.mark.usefixtures("here")


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def pair(number=0, **changes):
    texts = {"prompt": f"Why {number}?", "chosen": f" so {number}", "rejected": f" no {number}"}
    return texts | changes


def rejected(here):
    """The file of rejected rows in the cache, and of each its number and reason."""
    part = here / "cache" / "rejected.parquet"
    prefix = hashlib.sha256((here / "data.jsonl").read_bytes()).hexdigest()[:16]
    rows = pq.read_table(part).to_pylist()
    assert {(row["file"], row["file_name"]) for row in rows} == {(prefix, "data.jsonl")}
    return part, [(row["row"], row["reason"]) for row in rows]


def test_few_enough_bad_rows_pass_and_fixed_data_run_where_bad_data_stopped(here, world):
    good = [pair(n) for n in range(9)]
    write("data.jsonl", *good, pair(9, chosen=""))
    named = ("1 of 10", "--max-bad-frac", "data.jsonl row 9", "empty_completion")
    words = ("precompute-ref", "data.jsonl", "--model", world.model, "--no-mlflow")
    said = refusal(3, *words, "--output", "cache", "--max-bad-frac", "0.09", names=named)
    part, rows = rejected(here)
    assert str(part.relative_to(here)) in said
    assert rows == [(9, "empty_completion")]
    assert not (here / "cache" / "manifest.json").exists()
    answer = success(*words, "--output", "cache", "--max-bad-frac", "0.1")
    assert "1 empty_completion" in answer.out
    assert "empty_completion" in align("inspect", "cache").out
    assert rejected(here)[1] == [(9, "empty_completion")]
    refusal(3, *words, "--output", "other")
    write("data.jsonl", *good)
    success(*words, "--output", "other")
    assert {path.name for path in (here / "other").iterdir()} == {"manifest.json", "data", "_align"}


def test_a_cache_of_other_settings_or_without_a_whole_manifest_is_not_used(journey, here):
    words = ("precompute-ref", journey.folder / "data.parquet", "--no-mlflow")
    changed = ("tokens.max_length", "2048", "64", "--output")
    refusal(4, *words, "--max-length", "64", names=changed)
    copy = shutil.copytree(journey.cache, here / "copy")
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"rows":60', '"rows":61'))
    for command in ("verify", "inspect", "export"):
        refusal(5, command, copy, names=(path,))


def test_log_probs_that_never_were_the_references_are_found(world):
    """Every digest holds, and yet the numbers are wrong."""
    config = load_settings({}, [], file=None, data=[str(world.data.paired)]).config
    options = ModelOptions(path=str(world.model))
    config = replace(config, model=options, tracking=TrackingOptions(mlflow=False))
    stage_one.run(config, Liar(options))
    success("verify", "align-cache", "--rescore", "0")
    refusal(5, "verify", "align-cache", names=("input row",))


def test_score_replaces_what_it_wrote_and_nothing_of_a_persons_own(world, reward_model, tmp_path):
    """`rows.jsonl` is a person's file, under the name that `align score` gives its own."""
    own = shutil.copy(world.data.paired_jsonl, tmp_path / "rows.jsonl")
    before = own.read_bytes()
    words = (own, "--reward-model", reward_model, "--output", tmp_path)
    refusal(2, "score", *words, names=("rows.jsonl", "rewards"))
    assert own.read_bytes() == before
    assert [*tmp_path.iterdir()] == [own]

    out = OutputFolder(tmp_path / "out", "rewards")
    out.prepare()
    written, content = out.root / "rows.jsonl", []
    roles, scores = (Role.CHOSEN, Role.REJECTED), (1.0, 0.0)
    rows = [(TextRow(0, n, f"Why {n}?", ("so", "no"), roles, scores), scores) for n in range(9)]
    for count in (9, 4):
        assert write_rewarded(out, rows[:count]) == (count, 2 * count)
        content.append(written.read_bytes())
        assert len(content[-1].splitlines()) == count
    written.write_bytes(content[0])  # as a kill before the last rename leaves it
    write_rewarded(out, rows[:4])
    edited = content[1] + json.dumps({"prompt": "mine"}).encode()
    written.write_bytes(edited)
    with refuses(UsageError, "rows.jsonl"):
        write_rewarded(out, rows)
    assert written.read_bytes() == edited


KINDS = {
    "cache": lambda path: CacheWork(path, "0" * 64),
    "training run": RunFolder,
    "samples": lambda path: TableFolder(path, "samples"),
    **{kind: lambda path, kind=kind: OutputFolder(path, kind) for kind in ("rewards", "sweep")},
}


def test_a_folder_of_one_command_or_of_a_person_is_not_taken_by_another(tmp_path):
    mine = tmp_path / "mine" / "sweep.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    for kind, folder in KINDS.items():
        with refuses(UsageError, "sweep.json", "--output"):
            folder(mine.parent).prepare()
        with refuses(UsageError, mine):
            folder(mine).prepare()
        assert [path.read_text() for path in mine.parent.iterdir()] == ["mine"]
        root = tmp_path / kind
        folder(root).prepare()
        folder(root).prepare()
        for other in KINDS.keys() - {kind}:
            with refuses(UsageError, root, other):
                KINDS[other](root).prepare()
