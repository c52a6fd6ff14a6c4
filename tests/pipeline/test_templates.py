"""Caches under chat templates: of wrapped text."""

import json
from dataclasses import replace
from zlib import crc32

import pyarrow.parquet as pq
import pytest

from align.pipeline.precompute.precompute import precompute
from align.pipeline.rounds.round_prompts import split_prompts
from align.schemas.config import ModelOptions
from align.schemas.data_options import DataOptions
from align.schemas.errors import BadDataError, FingerprintError, UsageError
from support.byte_tokenizers import CHATML, FAMILIES, byte_tokenizer
from support.read_rows import user, write_rows
from support.refusals import refuses
from support.stage_one import Heard, run
from support.stub_reference import StubReference


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    def saved(template):
        family = FAMILIES["qwen base"] | {"template": template}
        return byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)

    return {name: saved(one) for name, one in (("qwen", CHATML), ("bare", None))}


@pytest.fixture
def over(config, models, tmp_path):
    """A config over files of rows, into a cache of this name."""

    def make(name, model, *files, wrap="auto"):
        # Named by what they hold: the names of files are a part of a cache.
        names = [f"{crc32(json.dumps(rows).encode())}.jsonl" for rows in files]
        paths = [write_rows(tmp_path / name, rows) for name, rows in zip(names, files, strict=True)]
        return replace(
            config,
            model=ModelOptions(path=models[model]),
            data=DataOptions(files=paths, wrap=wrap),
            cache=replace(config.cache, output=str(tmp_path / name)),
        )

    return make


def text(number, **more):
    return {"prompt": f"Q{number}?", "chosen": f" yes {number}", "rejected": " no", **more}


TEXTS = [text(number) for number in range(20)]
BRIEF = [text(number, system="Be brief.") for number in range(20)]
CHATS = [{"prompt": [user(f"Q{n}?")], "chosen": f"yes {n}", "rejected": "no"} for n in range(20)]


def said(config):
    heard = Heard()
    outcome = precompute(config, StubReference(), progress=heard)
    return outcome, [line for line in heard.lines if "data.wrap" in line]


def row_ids(made):
    shards = [made.folder / "data" / shard.file for shard in made.manifest.shards]
    return [pq.read_table(shard)["row_id"].to_pylist() for shard in shards]


def test_unwrapped_text_is_noted_where_there_is_a_template(over):
    auto, (line,) = said(over("auto", "qwen", TEXTS))
    assert "20 rows" in line
    assert "data.wrap=chat" in line
    none, silent = said(over("none", "qwen", TEXTS, wrap="none"))
    assert (none.manifest.root, silent) == (auto.manifest.root, [])
    assert "data.wrap" not in auto.manifest.fingerprint
    assert said(over("bare", "bare", TEXTS))[1] == []
    assert said(over("chats", "qwen", CHATS))[1] == []
    with refuses(UsageError, "data.wrap", "chat template"):
        run(over("bare", "bare", TEXTS, wrap="chat"))


def test_wrapped_text_makes_the_rows_of_conversations(over):
    wrapped, lines = said(over("chat", "qwen", TEXTS, wrap="chat"))
    assert (wrapped.manifest.fingerprint["data.wrap"], lines) == ("chat", [])
    asked = run(over("chats", "qwen", CHATS))
    assert row_ids(wrapped) == row_ids(asked)
    with refuses(FingerprintError, "data.wrap: ", "chat"):
        run(over("chat", "qwen", TEXTS, wrap="none"))


def test_text_that_cannot_be_wrapped_is_refused(over):
    rendered = [text(n, prompt=f"Human: Q{n}?") for n in range(20)]
    config = over("rendered", "qwen", rendered, wrap="chat")
    for refuse in (run, split_prompts):  # the rounds ask what stage 1 scores
        with refuses(BadDataError, "20 schema", "data.wrap=none"):
            refuse(config)
    assert run(over("rendered", "qwen", rendered, wrap="none")).manifest.rows == 20
    none = over("brief", "qwen", BRIEF, wrap="none")
    with refuses(BadDataError, "data.wrap=chat", "--map system="):
        run(none)
    assert run(over("wrapped", "qwen", BRIEF, wrap="chat")).manifest.rows == 20
