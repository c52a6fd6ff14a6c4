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
from align.schemas.rows import Record, Role
from align.stages.storage.cache.cache_folder import CacheFolder, OutputFolder
from align.stages.storage.run.run_folder import RunFolder
from align.stages.storage.tables import TableFolder
from support import stage_one
from support.command import align, refusal
from support.stub_reference import Liar

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def model(world):
    return world.model


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def run(code, *arguments):
    return refusal(code, "precompute-ref", *arguments, "--no-mlflow", "--output", "cache")


def pair(number=0, **changes):
    texts = {"prompt": f"Why {number}?", "chosen": f" so {number}", "rejected": f" no {number}"}
    return texts | changes


def test_what_is_not_named_is_asked_for(world, model):
    said = run(2, world.data.paired)
    for way in ("--model DIR", "ALIGN_MODEL", "align.yaml"):
        assert way in said
    assert "No data files" in run(2, "--model", model)


# What the file holds, and what the message has to name.
ROWS = {
    "columns that fit nothing": (
        [{"promt": "a", "chosen_text": "b", "rejected": "c"}],
        ("data.jsonl", "'promt', 'chosen_text', 'rejected'", "--map prompt=", "'chosen_text'?"),
    ),
    "completions without scores": (
        [{"prompt": f"Why {n}?", "completions": [" so", " no"]} for n in range(3)],
        ("data.jsonl", "--map scores=", "align score"),
    ),
    "a prompt under no name": ([pair()], ("Did you mean 'prompt'? Change --map",), "prompt=promtp"),
    "a map of nothing": ([pair()], ("OURS=YOURS",), "prompt"),
}


def test_rows_that_cannot_be_used_are_refused_with_a_way_on(here, model):
    for name, (rows, named, *maps) in ROWS.items():
        more = [word for one in maps for word in ("--map", one)]
        said = run(2, write("data.jsonl", *rows), "--model", model, *more)
        assert [word for word in named if word not in said] == [], name
        assert not [*here.rglob("data/*.parquet")]  # before anything was scored


def test_a_file_that_cannot_be_read_is_named(here, model, world):
    whole = world.data.paired.read_bytes()
    (here / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (here / "broken.parquet").write_bytes(whole[:100] + bytes(300) + whole[400:])
    for name, code, said in (
        ("nope.parquet", 2, "no such file or folder"),
        ("cut.parquet", 2, "cannot be read as parquet"),
        ("broken.parquet", 3, "read after row 0"),
    ):
        told = run(code, name, "--model", model)
        assert name in told
        assert said in told


def rejected(here):
    """The file of rejected rows in the cache, and of each its number and reason."""
    part = here / "cache" / "rejected.parquet"
    prefix = hashlib.sha256((here / "data.jsonl").read_bytes()).hexdigest()[:16]
    rows = pq.read_table(part).to_pylist()
    assert {(row["file"], row["file_name"]) for row in rows} == {(prefix, "data.jsonl")}
    return part, [(row["row"], row["reason"]) for row in rows]


def test_few_enough_bad_rows_pass_and_fixed_data_run_where_bad_data_stopped(here, model):
    good = [pair(n) for n in range(9)]
    write("data.jsonl", *good, pair(9, chosen=""))
    said = run(3, "data.jsonl", "--model", model, "--max-bad-frac", "0.09")
    for told in ("1 of 10 rows", "--max-bad-frac", "data.jsonl row 9: empty_completion"):
        assert told in said
    part, rows = rejected(here)
    assert str(part.relative_to(here)) in said
    assert rows == [(9, "empty_completion")]
    assert not (here / "cache" / "manifest.json").exists()
    words = ("precompute-ref", "data.jsonl", "--model", model, "--no-mlflow")
    answer = align(*words, "--output", "cache", "--max-bad-frac", "0.1")
    assert answer.code == 0, answer
    assert "1 of 10 rows dropped: 1 empty_completion" in answer.out
    assert "empty_completion" in align("inspect", "cache").out
    assert rejected(here)[1] == [(9, "empty_completion")]
    refusal(3, *words, "--output", "other")
    write("data.jsonl", *good)
    assert align(*words, "--output", "other").code == 0
    assert {path.name for path in (here / "other").iterdir()} == {"manifest.json", "data", "_align"}


def test_what_a_model_folder_lacks_is_named(here, world, model):
    bare = here / "bare"
    for gone, data, named in (
        (["model.safetensors"], "paired", ("bare: there is no model.safetensors",)),
        (["config.json"], "paired", ("config.json",)),
        (["chat_template.jinja"], "paired_chat", ("no chat template", "tokens.chat_template=")),
        (["tokenizer.json", "tokenizer_config.json"], "paired", ("bare: no tokenizer",)),
    ):
        shutil.rmtree(bare, ignore_errors=True)
        shutil.copytree(model, bare)
        for name in gone:
            (bare / name).unlink()
        said = run(2, getattr(world.data, data), "--model", bare)
        assert [word for word in named if word not in said] == []
    assert "/nowhere: no such model folder" in run(2, world.data.paired, "--model", "/nowhere")


def test_an_output_that_is_another_cache_or_none(journey, here, world, model):
    words = ("precompute-ref", journey.folder / "data.parquet", "--no-mlflow")
    said = refusal(4, *words, "--max-length", "64")
    assert "tokens.max_length: the cache has 2048, now 64" in said
    assert "--output" in said
    (here / "cache").mkdir()
    (here / "cache" / "photo.jpg").write_bytes(b"")
    assert "cache holds 'photo.jpg'" in run(2, world.data.paired, "--model", model)
    shutil.rmtree("cache")
    (here / "cache").touch()
    assert "cache is not a folder" in run(2, world.data.paired, "--model", model)


@pytest.fixture
def copy(journey, here):
    shutil.copytree(journey.cache, here / "copy")
    return here / "copy"


def test_a_cache_without_a_whole_manifest_is_never_used(copy, here):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"rows":60', '"rows":61'))
    for command in ("verify", "inspect", "export"):
        assert f"{path} is damaged" in refusal(5, command, copy)
        assert f"{here} is not a finished cache" in refusal(2, command, here)


def test_log_probs_that_never_were_the_references_are_found(world):
    """Every digest holds, and yet the numbers are wrong."""
    config = load_settings({}, [], file=None, data=[str(world.data.paired)]).config
    options = ModelOptions(path=str(world.model))
    config = replace(config, model=options, tracking=TrackingOptions(mlflow=False))
    stage_one.run(config, Liar(options))
    assert align("verify", "align-cache", "--rescore", "0").code == 0
    assert "a branch of input row " in refusal(5, "verify", "align-cache")


def test_score_replaces_what_it_wrote_and_nothing_of_a_persons_own(world, reward_model, tmp_path):
    """`rows.jsonl` is a person's file, under the name that `align score` gives its own."""
    own = shutil.copy(world.data.paired_jsonl, tmp_path / "rows.jsonl")
    before = own.read_bytes()
    said = refusal(2, "score", own, "--reward-model", reward_model, "--output", tmp_path)
    assert "and is not a rewards folder" in said
    assert own.read_bytes() == before
    assert [*tmp_path.iterdir()] == [own]

    out = OutputFolder(tmp_path / "out", "rewards")
    out.prepare()
    written, content = out.root / "rows.jsonl", []
    roles, scores = (Role.CHOSEN, Role.REJECTED), (1.0, 0.0)
    rows = [(Record(0, n, f"Why {n}?", ("so", "no"), roles, scores), scores) for n in range(9)]
    for count in (9, 4):
        assert write_rewarded(out, rows[:count]) == (count, 2 * count)
        content.append(written.read_bytes())
        assert len(content[-1].splitlines()) == count
    written.write_bytes(content[0])  # as a kill before the last rename leaves it
    write_rewarded(out, rows[:4])
    edited = content[1] + json.dumps({"prompt": "mine"}).encode()
    written.write_bytes(edited)
    with pytest.raises(UsageError, match=r"rows\.jsonl"):
        write_rewarded(out, rows)
    assert written.read_bytes() == edited


KINDS = {
    "cache": CacheFolder,
    "training run": RunFolder,
    "samples": lambda path: TableFolder(path, "samples"),
    **{kind: lambda path, kind=kind: OutputFolder(path, kind) for kind in ("rewards", "sweep")},
}


def test_a_folder_of_one_command_or_of_a_person_is_not_taken_by_another(tmp_path):
    mine = tmp_path / "mine" / "sweep.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    for kind, folder in KINDS.items():
        with pytest.raises(UsageError, match=r"sweep\.json.*Choose another --output"):
            folder(mine.parent).prepare()
        with pytest.raises(UsageError, match="not a folder"):
            folder(mine).prepare()
        assert [path.read_text() for path in mine.parent.iterdir()] == ["mine"]
        root = tmp_path / kind
        folder(root).prepare()
        folder(root).prepare()
        for other in KINDS.keys() - {kind}:
            with pytest.raises(UsageError, match=f"is not a {other} folder"):
                KINDS[other](root).prepare()
