"""Data of plain text and a model with a chat template, from the settings to the cache."""

import json
from dataclasses import replace

import pytest

from align.pipeline.precompute import precompute
from align.pipeline.round_prompts import split_prompts
from align.schemas.config import DataOptions, ModelOptions
from align.schemas.errors import BadDataError, FingerprintError, UsageError
from support.byte_tokenizers import FAMILIES, byte_tokenizer
from support.stage_one import Heard, run
from support.stub_reference import StubReference


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["qwen base"])


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    family = FAMILIES["qwen base"] | {"template": None}
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)


def row(number, **more):
    return {"prompt": f"Q{number}?", "chosen": f" yes {number}", "rejected": " no", **more}


CHATS = [
    {"prompt": [{"role": "user", "content": f"Q{n}?"}], "chosen": f"yes {n}", "rejected": "no"}
    for n in range(20)
]


@pytest.fixture
def over(config, qwen, tmp_path):
    """A config over such rows, into a cache named after how they are wrapped."""

    def make(wrap="auto", rows=None, model=qwen):
        data = tmp_path / f"{'rows' if rows is None else 'others'}.jsonl"
        rows = rows or [row(number) for number in range(20)]
        data.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return replace(
            config,
            model=ModelOptions(path=model),
            data=DataOptions(files=[str(data)], wrap=wrap),
            cache=replace(config.cache, output=str(tmp_path / f"cache-{wrap}")),
        )

    return make


def said(config):
    heard = Heard()
    outcome = precompute(config, StubReference(), progress=heard)
    return outcome, [line for line in heard.lines if "data.wrap" in line]


def test_text_is_left_as_it_is_and_one_line_says_so_where_there_is_a_template(over, bare):
    auto, lines = said(over())
    assert len(lines) == 1
    assert "20 rows" in lines[0]
    assert "data.wrap=chat" in lines[0]
    none, silent = said(over("none"))
    assert silent == []
    assert none.manifest.root == auto.manifest.root
    assert "data.wrap" not in auto.manifest.fingerprint
    assert said(replace(over(model=bare), cache=over("bare").cache))[1] == []
    assert said(replace(over(rows=CHATS), cache=over("chats").cache))[1] == []


def test_a_cache_of_wrapped_text_says_so_and_holds_what_one_of_conversations_holds(over):
    wrapped, lines = said(over("chat"))
    assert (wrapped.manifest.fingerprint["data.wrap"], lines) == ("chat", [])
    asked = run(over("none", CHATS))
    assert {one.ids_digest for one in wrapped.manifest.shards} == {
        one.ids_digest for one in asked.manifest.shards
    }
    with pytest.raises(FingerprintError, match=r"data\.wrap: the cache has chat, now nothing"):
        run(replace(over("none"), cache=over("chat").cache))


def test_data_that_are_rendered_already_are_refused_before_anything_is_scored(over, qwen, bare):
    rendered = [row(n, prompt=f"<|im_start|>user\nQ{n}?<|im_end|>\n") for n in range(20)]
    with pytest.raises(BadDataError, match=r"(?s)20 already_rendered.*data\.wrap=none") as refused:
        run(over("chat", rendered))
    assert "<|im_start|>" in str(refused.value) or "<|im_end|>" in str(refused.value)
    with pytest.raises(UsageError, match=r"data\.wrap is chat .* no chat template"):
        run(over("chat", model=bare))


def test_a_system_column_beside_text_is_refused_with_both_ways_on_and_both_go(over):
    rows = [row(n, system="Be brief.") for n in range(20)]
    with pytest.raises(BadDataError, match=r"data\.wrap=chat.*--map system="):
        run(over("none", rows))
    assert run(over("chat", rows)).manifest.rows == 20
    left_out = over("none", rows)
    left_out = replace(left_out, data=replace(left_out.data, map={"system": ""}))
    assert run(left_out).manifest.rows == 20


def prompts_of(config):
    return split_prompts(config).train


def test_rounds_ask_what_stage_one_scores(over):
    rows = [row(n, system="Be brief.") for n in range(20)]
    (first, *_) = prompts_of(over("chat", rows))
    system, user = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q0?"})
    assert first.text == (system, user)
    assert prompts_of(over("none"))[0].text == "Q0?"
    transcript = [row(n, prompt=f"Human: Q{n}?") for n in range(20)]
    with pytest.raises(BadDataError, match="already_rendered"):
        prompts_of(over("chat", transcript))
