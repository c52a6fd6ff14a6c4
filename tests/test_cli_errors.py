"""What a person gets wrong: one message, the right exit code, what to do about it."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.settings import load_settings
from align.schemas.config import ModelOptions, TrackingOptions
from align.stages.model.reference import HfReference
from support import stage_one
from support.command import align, refusal
from support.stub_reference import StubReference

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def model(world):
    return world.model


def write(name, *rows):
    with open(name, "w") as file:  # noqa: PTH123
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def digest_prefix(name):
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]


def run(code, *arguments):
    return refusal(code, "precompute-ref", *arguments, "--no-mlflow", "--output", "cache")


def pair(number=0, **changes):
    return {
        "prompt": f"Why {number}?",
        "chosen": f" so {number}",
        "rejected": f" no {number}",
    } | changes


def label(number, value):
    return {"prompt": f"Why {number}?", "completion": f" so {number}", "label": value}


def test_no_model(world):
    said = run(2, world.data.paired)
    for way in ("--model DIR", "ALIGN_MODEL", "align.yaml"):
        assert way in said


def test_no_data(model):
    assert "No data files given" in run(2, "--model", model)


def test_no_such_file(model):
    said = run(2, "nope.parquet", "--model", model)
    assert said == "nope.parquet: no such file or folder. Check the path.\n"


def test_columns_that_fit_nothing(model):
    write("data.jsonl", {"promt": "a", "chosen_text": "b", "rejected": "c"})
    said = run(2, "data.jsonl", "--model", model)
    assert "data.jsonl has the columns 'promt', 'chosen_text', 'rejected'" in said
    assert "--map chosen=chosen_text" in said


def test_a_prompt_under_another_name_is_hinted_at(model):
    write("data.jsonl", {"ask": "a", "chosen": "b", "rejected": "c"})
    said = run(3, "data.jsonl", "--model", model)
    assert "share no beginning" in said
    assert "--map prompt=NAME" in said


def test_text_that_nothing_reads(model):
    write("data.jsonl", *[pair(n, input=f"the number {n} of them") for n in range(9)])
    said = run(2, "data.jsonl", "--model", model)
    assert "data.jsonl holds free text that nothing reads" in said
    assert "'input'" in said
    assert "--map input=" in said


def test_text_that_begins_behind_thousands_of_rows_is_refused_before_a_score(here, model):
    rows = [pair(n) for n in range(3000)]
    write("data.jsonl", *rows, pair(3000, input="What is the number after this?"))
    said = run(2, "data.jsonl", "--model", model)
    assert "data.jsonl row 3,000 holds free text" in said
    assert not [*here.rglob("*.parquet")]


def test_completions_without_scores(model):
    rows = [{"prompt": f"Why {n}?", "completions": [" so", " no"]} for n in range(3)]
    write("data.jsonl", *rows)
    said = run(2, "data.jsonl", "--model", model)
    assert "'completions' and no scores" in said
    assert "--map scores=YOURS" in said
    assert "align score data.jsonl" in said
    write("data.jsonl", *[row | {"ratings": [1, 2]} for row in rows])
    assert "--map scores=ratings" in run(2, "data.jsonl", "--model", model)
    write("data.jsonl", *[row | {"labels": [True, False]} for row in rows])
    assert "'labels'" in run(2, "data.jsonl", "--model", model)


@pytest.mark.parametrize("named", ["d", "d/*.jsonl"])
def test_a_training_split_and_its_test_split(here, model, named):
    (here / "d").mkdir()
    for split in ("train-0", "train-1", "test-0"):
        write(f"d/{split}.jsonl", pair(0))
    files = [named] if named == "d" else sorted(map(str, Path("d").glob("*.jsonl")))
    said = run(2, *files, "--model", model)
    assert "\n  align precompute-ref d/train*.jsonl\n" in said
    assert "\n  align precompute-ref d/test-0.jsonl --output cache-test\n" in said


def test_a_map_of_a_column_that_is_not_there(model):
    write("data.jsonl", {"question": "a", "chosen": "b", "rejected": "c"})
    said = run(2, "data.jsonl", "--model", model, "--map", "prompt=qestion")
    assert "Did you mean 'question'? Change --map" in said
    assert "OURS=YOURS" in run(2, "data.jsonl", "--model", model, "--map", "prompt")


@pytest.mark.parametrize("name", ["empty.parquet", "empty.jsonl", "empty.csv"])
def test_an_empty_file(here, model, name):
    (here / name).touch()
    assert f"{name} is empty (0 bytes)" in run(2, name, "--model", model)


def test_a_table_without_rows(here, model, world):
    pq.write_table(pq.read_table(world.data.paired).slice(0, 0), "none.parquet")
    assert "none.parquet has no rows" in run(2, "none.parquet", "--model", model)


def test_a_damaged_parquet_file(here, model, world):
    whole = world.data.paired.read_bytes()
    (here / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    said = run(2, "cut.parquet", "--model", model)
    assert "cut.parquet cannot be read as parquet" in said
    broken = bytearray(whole)
    broken[100:400] = bytes(300)
    (here / "broken.parquet").write_bytes(broken)
    said = run(3, "broken.parquet", "--model", model)
    assert "broken.parquet cannot be read after row 0" in said
    assert "write it again" in said


def test_a_label_that_is_neither(here, model):
    write("data.jsonl", label(0, True), label(1, "maybe"), label(2, False), label(3, None))
    said = run(3, "data.jsonl", "--model", model)
    assert "2 of 4 rows cannot be used (1 bad_label, 1 null); --max-bad-frac allows 0.001" in said
    assert "data.jsonl row 1: bad_label: 'label' is neither true nor false: 'maybe'" in said
    assert "data.jsonl row 3: null" in said
    (part,) = (here / "cache" / "quarantine").iterdir()
    assert str(part.relative_to(here)) in said
    rows = pq.read_table(part).to_pylist()
    assert [(row["file"], row["file_name"], row["row"], row["reason"]) for row in rows] == [
        (digest_prefix("data.jsonl"), "data.jsonl", 1, "bad_label"),
        (digest_prefix("data.jsonl"), "data.jsonl", 3, "null"),
    ]
    assert not (here / "cache" / "manifest.json").exists()


def test_few_enough_bad_rows_pass_and_are_counted(here, model):
    write("data.jsonl", *[pair(n) for n in range(9)], pair(9, chosen=""))
    run(3, "data.jsonl", "--model", model, "--max-bad-frac", "0.09")
    arguments = ["--model", model, "--no-mlflow", "--output", "cache", "--max-bad-frac", "0.1"]
    answer = align("precompute-ref", "data.jsonl", *arguments)
    assert answer.code == 0, answer
    assert "1 of 10 rows dropped: 1 empty_completion" in answer.out
    assert "empty_completion" in align("inspect", "cache").out
    (part,) = (here / "cache" / "quarantine").iterdir()
    (row,) = pq.read_table(part).to_pylist()
    stood = (digest_prefix("data.jsonl"), 9, "empty_completion")
    assert (row["file"], row["row"], row["reason"]) == stood
    assert "'chosen'" in row["detail"]


def test_fixed_data_run_where_bad_data_stopped(here, model):
    write("data.jsonl", pair(0), pair(1, rejected=""))
    run(3, "data.jsonl", "--model", model)
    write("data.jsonl", pair(0), pair(1))
    answer = align(
        "precompute-ref", "data.jsonl", "--model", model, "--output", "cache", "--no-mlflow"
    )
    assert answer.code == 0, answer
    assert {path.name for path in (here / "cache").iterdir()} == {"manifest.json", "data", "_align"}


def without(model, folder, *names):
    shutil.copytree(model, folder)
    for name in names:
        (folder / name).unlink()
    return folder


def test_a_model_folder_that_is_none(here, world, model):
    assert "/nowhere: no such model folder" in run(2, world.data.paired, "--model", "/nowhere")
    said = run(2, world.data.paired, "--model", world.data.paired.parent)
    assert "no tokenizer can be loaded from here" in said


def test_a_model_without_weights(here, world, model):
    bare = without(model, here / "bare", "model.safetensors")
    said = run(2, world.data.paired, "--model", bare)
    assert f"{bare}: there is no model.safetensors" in said
    (bare / "pytorch_model.bin").write_bytes(b"x")
    said = run(2, world.data.paired, "--model", bare)
    assert "pickles (.bin or .pt), which can run code when read. Convert them once" in said


def test_a_model_without_its_config(here, world, model):
    bare = without(model, here / "bare", "config.json")
    assert "config.json: the file is missing" in run(2, world.data.paired, "--model", bare)


def test_conversations_without_a_template(here, world, model):
    bare = without(model, here / "bare", "chat_template.jinja")
    said = run(2, world.data.paired_chat, "--model", bare)
    assert "the data are conversations and the tokenizer has no chat template" in said
    assert "--set tokens.chat_template=FILE.jinja" in said


def test_a_template_that_fails_on_every_row(here, world, model):
    (here / "bad.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    template = ["--set", "tokens.chat_template=bad.jinja"]
    said = run(3, world.data.paired_chat, "--model", model, *template)
    assert "60 of 60 rows cannot be used (60 template_error)" in said
    assert "roles must alternate" in said


def test_an_output_that_is_another_cache(journey):
    said = refusal(
        4, "precompute-ref", journey.folder / "data.parquet", "--no-mlflow", "--max-length", "64"
    )
    assert "was made with other settings" in said
    assert "tokens.max_length: the cache has 2048, now 64" in said
    assert "Choose another --output" in said


def test_an_output_that_is_no_cache(here, world, model):
    (here / "cache").mkdir()
    (here / "cache" / "photo.jpg").write_bytes(b"")
    said = run(2, world.data.paired, "--model", model)
    assert "cache holds 'photo.jpg' and is not a cache folder" in said
    shutil.rmtree("cache")
    (here / "cache").touch()
    assert "cache is not a folder" in run(2, world.data.paired, "--model", model)


def test_a_folder_that_is_no_cache(here):
    for command in ("verify", "inspect", "export"):
        assert "not a finished cache" in refusal(2, command, here)


def test_a_launcher_that_counts_in_words(world, model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    said = run(2, world.data.paired, "--model", model)
    assert "WORLD_SIZE=two" in said
    assert "these are not a rank below WORLD_SIZE" in said


@pytest.fixture
def copy(journey, here):
    shutil.copytree(journey.cache, here / "copy")
    return here / "copy"


def damage(path, at=-200):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_shard_is_named(copy):
    shard = sorted((copy / "data").iterdir())[3]
    damage(shard)
    said = refusal(5, "verify", copy, "--rescore", "0")
    assert f"unit 3: {shard} is not what was written (sha256 differs)" in said
    assert "1 of 8 files are damaged" in said


def test_missing_and_cut_shards_are_all_named(copy):
    shards = sorted((copy / "data").iterdir())
    shards[1].unlink()
    shards[6].write_bytes(shards[6].read_bytes()[:-1])
    said = refusal(5, "verify", copy, "--rescore", "0")
    assert "unit 1: " in said
    assert "unit 6: " in said


def test_a_damaged_manifest_is_never_used(copy):
    path = copy / "manifest.json"
    for text in (
        path.read_text().replace('"rows":60', '"rows":61'),
        "{}",
        "",
        "\x00",
        "[" * 99_999,
    ):
        path.write_text(text)
        for command in ("verify", "inspect", "export"):
            assert f"{path} is damaged" in refusal(5, command, copy)


def test_a_manifest_of_tomorrow_asks_for_tomorrows_align(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"format_version":2', '"format_version":9'))
    assert "Install a newer align" in refusal(4, "verify", copy)


def test_a_cache_of_an_older_align_is_refused_with_the_command_that_makes_it_anew(
    copy, world, here
):
    path = copy / "manifest.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | {"format_version": 1, "a_field_of_then": 3}))
    anew = f"align precompute-ref data.parquet --model {world.model} --output {copy}-v2"
    made = ("--set model.dtype=float32", "--set cache.rows_per_shard=8")
    config = ("--set", f"cache.output={copy}")
    doors = [
        *((command, copy) for command in ("verify", "inspect", "export")),
        ("train", "--cache", copy, "--method", "dpo", "--no-mlflow"),
        ("precompute-ref", world.data.paired, "--model", world.model, "--no-mlflow", *config),
    ]
    for words in doors:
        said = refusal(4, *words)
        assert f"{path} has format version 1, made by an older align" in said
        assert all(part in said for part in (anew, *made))
    assert json.loads(path.read_text())["format_version"] == 1


class Liar:
    """Claims to be the model, and scores as the stub does."""

    def __init__(self, options):
        honest = HfReference(options)
        self.identity, self.hidden_size = honest.identity, honest.hidden_size
        self.open = StubReference().open


def test_log_probs_that_never_were_the_references_are_found(here, world):
    """Every digest holds, and yet the numbers are wrong."""
    config = load_settings({}, [], file=None, data=[str(world.data.paired)]).config
    options = ModelOptions(path=str(world.model))
    config = replace(config, model=options, tracking=TrackingOptions(mlflow=False))
    stage_one.run(config, Liar(options))
    assert align("verify", "align-cache", "--rescore", "0").code == 0
    said = refusal(5, "verify", "align-cache")
    assert "a branch of input row " in said
    assert "does not hold this reference's log-probs" in said
