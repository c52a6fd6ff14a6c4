"""What was scored once is never scored again, and only what is the same is reused."""

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.precompute.opening import register_cache, require_same
from align.schemas.config import ModelOptions
from align.schemas.data_options import DataOptions
from align.schemas.errors import FingerprintError, UsageError
from align.schemas.rows import Role, TextRow
from align.stages.data.row_keys import prompt_keys_of
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import CacheWork, unfinished_work
from support.patience import PATIENCE
from support.read_rows import write_rows
from support.refusals import refuses
from support.stage_one import child, contents, run
from support.stub_reference import StubReference


def with_data(config, *files):
    return replace(config, data=DataOptions(files=[str(file) for file in files]))


@pytest.fixture
def data_rows(data):
    return [json.loads(line) for line in data.paired_jsonl.read_text().splitlines()]


def values(folder):
    """Every completion's score by row, and by what is scored."""
    return {
        (tuple(row["prompt_ids"]), tuple(ids)): logp
        for commit in Cache(Path(folder)).manifest().shards
        for row in pq.read_table(Path(folder) / "data" / commit.file).to_pylist()
        for ids, logp in zip(row["completion_ids"], row["ref_logp"], strict=True)
    }


def test_of_a_named_cache_what_is_the_same_is_reused_and_nothing_else(to, tmp_path):
    first = run(to())
    alone = first.counts.reused  # a completion may be copied from its like in the same shard

    def beside(name, reference=None, **cache):
        output = str(tmp_path / name)
        return run(to(output=output, reuse=[to().cache.output], **cache), reference).counts

    assert beside("same").scored == 0
    assert contents(to().cache.output) == contents(tmp_path / "same")
    assert run(
        replace(to(), train=replace(to().train, lr=1e-3), method={"name": "kto"})
    ).was_complete
    known = replace(to().cache, output=str(tmp_path / "far" / "b"), reuse_known=True)
    assert run(replace(to(), cache=known)).counts.scored == 0
    assert beside("other", StubReference("other")).reused == alone
    assert beside("pairs", kl_pairs=0).scored == 0
    assert beside("shards", shards=3).reused > first.manifest.branches // 2  # and most partners
    run(to(output=str(tmp_path / "sums"), token_logps=False))
    wanted = to(output=str(tmp_path / "tokens"), reuse=[str(tmp_path / "sums")])
    assert run(wanted).counts.reused == alone  # sums alone, where tokens are wanted
    with refuses(UsageError, tmp_path / "none"):
        run(to(output=str(tmp_path / "c"), reuse=[str(tmp_path / "none")]))


def test_a_finished_cache_never_changes(config, data_rows, tmp_path):
    path = tmp_path / "data.jsonl"
    write_rows(path, data_rows[:100])
    few = with_data(config, path)
    run(few)
    kept = contents(few.cache.output)
    write_rows(path, data_rows)
    with refuses(FingerprintError, "data.files: ", "--output"):
        run(few)  # the same command, the same folder
    assert contents(few.cache.output) == kept


PAIRS = [
    {"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": f" Not {n}."}
    for n in range(120)
]
# One cache has the first hundred and another the next ten: which pairs are wanted then, and how
# many of their completions are new.
NEXT = {
    "re-ordered": (PAIRS[99::-1], 0),
    "filtered": (PAIRS[:100:3], 0),
    "grown": ([*PAIRS[:100], *PAIRS[110:]], 20),
    "mixed": ([*PAIRS[90:110:2], *PAIRS[:50], *PAIRS[105:115]], 10),
    "other answers": ([pair | {"rejected": " Who knows?"} for pair in PAIRS[:100]], 100),
}


@pytest.mark.parametrize("kl_pairs", [0, 1])
def test_of_changed_data_only_what_is_new_is_scored(config, tmp_path, kl_pairs):
    def made(name, pairs, reuse=()):
        data = with_data(config, write_rows(tmp_path / f"{name}.jsonl", pairs))
        how = {"kl_pairs": kl_pairs, "shards": 4, "reuse": [*reuse]}
        return run(replace(data, cache=replace(config.cache, output=str(tmp_path / name), **how)))

    earlier = [str(made(*one).folder) for one in (("a", PAIRS[:100]), ("b", PAIRS[100:110]))]
    known = {of: logp for folder in earlier for of, logp in values(folder).items()}
    for name, (pairs, count) in NEXT.items():
        second = made(name, pairs, earlier)
        found = values(second.folder)
        assert second.counts.scored == len(found.keys() - known.keys()), name
        assert second.counts.scored + second.counts.reused == second.manifest.branches, name
        if not kl_pairs:  # else partners come on top
            assert second.counts.scored == count, name
        assert {of: found[of] for of in found.keys() & known.keys()}.items() <= known.items()


def test_names_of_files_and_their_order_make_no_other_cache(config, data_rows, tmp_path):
    bad = {"prompt": "Why?", "chosen": "", "rejected": "no"}
    parts = {
        "a": data_rows[:60],
        "b": [*data_rows[50:], bad],
        "c": [bad, *data_rows[:60]],
        "twin of b": [],
    }
    files = [write_rows(tmp_path / f"{name}.jsonl", part) for name, part in parts.items()]
    Path(files[3]).write_bytes(Path(files[1]).read_bytes())
    found = {}
    for name, order in (("first", files), ("second", files[::-1])):
        cache = replace(config.cache, output=str(tmp_path / name))
        data = DataOptions(files=order, max_bad_frac=0.5)
        manifest = run(replace(config, data=data, cache=cache)).manifest
        found[name] = manifest.plan_key, contents(tmp_path / name)
    assert found["first"] == found["second"]
    renamed = [tmp_path / f"{number}.jsonl" for number in range(4, 0, -1)]
    for file, new in zip(files, renamed, strict=True):
        new.write_bytes(Path(file).read_bytes())
    for same in (files, [*map(str, renamed)]):
        data = DataOptions(files=same, max_bad_frac=0.5)
        assert run(replace(config, data=data, cache=cache)).was_complete

    names = {entry.sha256[:16]: entry.name for entry in manifest.inputs}
    shards = [tmp_path / name / "data" / shard.file for shard in manifest.shards]
    for row in (row for shard in shards for row in pq.read_table(shard).to_pylist()):
        file, number = row["source"].values()
        stem = names[file].removesuffix(".jsonl").removeprefix("twin of ")
        prompt = parts[stem][number]["prompt"]
        record = TextRow(0, 0, prompt, ("",), (Role.CHOSEN,), (None,))
        assert row["prompt_key"] == prompt_keys_of([record]).tobytes()
    lost = pq.read_table(tmp_path / name / manifest.rejected.file).to_pylist()
    assert len(lost) == 3
    assert all(names[row["file"]] == row["file_name"] for row in lost)


CHANGES = {
    "data.shape": ["weight2"],
    "tokens.max_length": 200,
    "tokens.max_prompt_length": 20,
    "tokens.prompt_side": "right",
    "tokens.bos": "never",
    "tokens.eos": "never",
    "tokens.date": "2026-01-01",
    "cache.kl_pairs": 2,
    "cache.token_logps": False,
    "cache.shards": 17,
    "scoring.tokens_per_batch": 999,
}


def test_a_changed_setting_is_noticed_and_named(config, data_rows, tmp_path):
    path = write_rows(tmp_path / "data.jsonl", [row | {"weight2": 1.0} for row in data_rows])
    config = with_data(config, path)
    run(config)
    before = contents(config.cache.output)
    for name, value in CHANGES.items():
        section, _, option = name.replace("data.shape", "data.carry").partition(".")
        options = replace(getattr(config, section), **{option: value})
        changed = replace(config, **{section: options})
        with refuses(FingerprintError, f"{name}: ", config.cache.output) as caught:
            run(changed)
        assert caught.value.exit_code == 4
        assert contents(config.cache.output) == before, name


def test_no_field_of_the_fingerprint_is_passed_over(config):
    stored = run(config).manifest.fingerprint
    with refuses(FingerprintError, "model: ", "stub", "other"):
        run(config, StubReference("other"))
    for name in stored:
        with refuses(FingerprintError, f"{name}: ", "other"):
            require_same(stored, stored | {name: "other"}, where="here", models=("", ""))


def test_a_changed_tokenizer_or_template_is_noticed_and_named(config, tmp_path):
    run(config)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in Path(config.model.path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = next(folder.glob("chat_template*"))
    template.write_text(template.read_text() + " ")
    with refuses(FingerprintError, "tokenizer.chat_template: "):
        run(replace(config, model=ModelOptions(path=str(folder))))
    vocabulary = folder / "tokenizer.json"
    content = json.loads(vocabulary.read_text())
    content["model"]["merges"].pop()
    vocabulary.write_text(json.dumps(content))
    with refuses(FingerprintError, "tokenizer.vocabulary: "):
        run(replace(config, model=ModelOptions(path=str(folder))))


def test_an_unfinished_cache_of_something_else_is_refused_too(config, to):
    child(config, "after:fsync_folder:commits=kill@2").join(PATIENCE)
    with refuses(FingerprintError, "unfinished", "cache.kl_pairs: "):
        run(to(kl_pairs=0))
    assert run(config).manifest.rows == 120


def test_an_unfinished_cache_that_is_named_is_reused(config, data_rows, tmp_path):
    path = tmp_path / "data.jsonl"
    write_rows(path, data_rows[:100])
    few = with_data(config, path)
    child(few, "after:fsync_folder:commits=kill@4").join(PATIENCE)
    write_rows(path, data_rows)
    output = few.cache.output
    with refuses(FingerprintError, "--output", f"--reuse {output}"):
        run(few)
    beside = replace(few.cache, output=str(tmp_path / "grown"))
    alone = run(replace(few, cache=replace(beside, output=str(tmp_path / "alone"))))
    second = run(replace(few, cache=replace(beside, reuse=[output])))
    assert second.counts.reused > alone.counts.reused
    assert values(tmp_path / "grown") == values(tmp_path / "alone")


def test_rows_that_are_missing_are_prepared_again_and_no_score_is_lost(config, clean, tmp_path):
    output, killed = Path(config.cache.output), tmp_path / "killed"
    child(config, "after:fsync_folder:commits=kill@4").join(PATIENCE)
    output.rename(killed)
    shards = [name for name in clean if name.startswith("data/")]
    every = ("*.json", "*.arrow")
    for gone in (*((kind,) for kind in every), every):
        shutil.copytree(killed, output)
        (work,) = unfinished_work(Cache(output))
        for kind in gone:
            (path,) = work.encoded.glob(kind)
            path.unlink()
        assert run(config).counts.shards == len(shards) - 4
        assert contents(output) == clean, gone
        shutil.rmtree(output)


def shards_of(folder):
    return sorted((Path(folder) / "data").iterdir())


def corrupt(shard):
    shard.write_bytes(shard.read_bytes()[:-9] + b"not these")


@pytest.fixture
def warnings(caplog):
    """The lines `align` warned with."""
    caplog.set_level(logging.WARNING, logger="align")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "align"]


@pytest.mark.parametrize(
    ("damage", "shards", "token_logps"), [(Path.unlink, 8, True), (corrupt, 3, False)]
)
def test_a_damaged_shard_is_scored_anew(to, tmp_path, warnings, damage, shards, token_logps):
    run(to(shards=shards, token_logps=token_logps))
    shard = shards_of(to().cache.output)[0]
    damage(shard)
    reused = to(output=str(tmp_path / "b"), reuse=[to().cache.output], token_logps=token_logps)
    outcome = run(reused)
    assert outcome.counts.scored
    assert outcome.counts.reused
    assert [shard.name in line for line in warnings()] == [True]
    run(to(output=str(tmp_path / "c"), token_logps=token_logps))
    assert scores(tmp_path / "b") == scores(tmp_path / "c")


def scores(folder):
    """What a cache says of each row."""
    return {
        row["row_id"]: (row["completion_ids"], row["ref_logp"], row.get("ref_token_logps"))
        for shard in shards_of(folder)
        for row in pq.read_table(shard).to_pylist()
    }


DAMAGE = {
    "garbled": lambda manifest: manifest.write_text("{}"),
    "cut": lambda manifest: os.truncate(manifest, 99),
}


@pytest.mark.parametrize("is_named", [True, False])
def test_caches_that_cannot_be_read_are_passed_over_and_named(to, tmp_path, warnings, is_named):
    outputs = [str(tmp_path / name) for name in DAMAGE]
    for shards, output in enumerate(outputs, start=3):
        run(to(output=output, shards=shards))
        register_cache(CacheWork(Path(output), "0" * 64))
        DAMAGE[Path(output).name](Path(output) / "manifest.json")
    again = to(reuse=outputs if is_named else [], reuse_known=not is_named)
    reused = run(again).counts.reused
    # Completions that are copied from their like in the same shard are no reuse of another cache.
    assert reused == run(to(output=str(tmp_path / "alone"))).counts.reused
    assert [output in line for output, line in zip(outputs, warnings(), strict=True)] == [True] * 2
