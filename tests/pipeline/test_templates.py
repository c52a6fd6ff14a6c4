"""Caches under chat templates: wrapped text, converted calls of tools, and what ends a turn."""

import json
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pyarrow.parquet as pq
import pytest

from align.pipeline.precompute import precompute
from align.pipeline.round_prompts import split_prompts
from align.schemas.cache import Stop, Stops
from align.schemas.config import DataOptions, ModelOptions, TokenOptions
from align.schemas.errors import BadDataError, FingerprintError, UsageError
from align.schemas.rows import Role
from align.stages.data.tokenizer import decoder, load_tokenizer
from align.stages.data.tool_forms import ToolForms
from support.byte_tokenizers import FAMILIES, byte_tokenizer
from support.read_rows import bot, user, write_rows
from support.stage_one import Heard, run
from support.stub_reference import StubReference
from support.tool_templates import HERMES, chat_tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["qwen base"])


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    family = FAMILIES["qwen base"] | {"template": None}
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["gemma"])


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tok"), HERMES)


@pytest.fixture
def over(config, tmp_path):
    """A config over files of rows, into a cache of this name."""

    def make(name, model, *files, wrap="auto"):
        # Named by what they hold: the names of files are a part of a cache.
        names = [f"{crc32(json.dumps(rows).encode())}.jsonl" for rows in files]
        paths = [write_rows(tmp_path / name, rows) for name, rows in zip(names, files, strict=True)]
        return replace(
            config,
            model=ModelOptions(path=model),
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


def test_text_is_left_as_it_is_and_one_line_says_so_where_there_is_a_template(over, qwen, bare):
    auto, (line,) = said(over("auto", qwen, TEXTS))
    assert "20 rows" in line
    assert "data.wrap=chat" in line
    none, silent = said(over("none", qwen, TEXTS, wrap="none"))
    assert (none.manifest.root, silent) == (auto.manifest.root, [])
    assert "data.wrap" not in auto.manifest.fingerprint
    assert said(over("bare", bare, TEXTS))[1] == []
    assert said(over("chats", qwen, CHATS))[1] == []
    with pytest.raises(UsageError, match=r"data\.wrap is chat .* no chat template"):
        run(over("bare", bare, TEXTS, wrap="chat"))


def test_a_cache_of_wrapped_text_says_so_and_holds_what_one_of_conversations_holds(over, qwen):
    wrapped, lines = said(over("chat", qwen, TEXTS, wrap="chat"))
    assert (wrapped.manifest.fingerprint["data.wrap"], lines) == ("chat", [])
    asked = run(over("chats", qwen, CHATS))
    assert {one.ids_digest for one in wrapped.manifest.shards} == {
        one.ids_digest for one in asked.manifest.shards
    }
    with pytest.raises(FingerprintError, match=r"data\.wrap: the cache has chat, now nothing"):
        run(over("chat", qwen, TEXTS, wrap="none"))


def test_what_cannot_be_wrapped_is_refused_with_each_way_on_and_each_goes(over, qwen):
    rendered = [text(n, prompt=f"<|im_start|>user\nQ{n}?<|im_end|>\n") for n in range(20)]
    with pytest.raises(BadDataError, match=r"(?s)20 already_rendered.*data\.wrap=none"):
        run(over("rendered", qwen, rendered, wrap="chat"))
    assert run(over("rendered", qwen, rendered, wrap="none")).manifest.rows == 20
    none = over("brief", qwen, BRIEF, wrap="none")
    with pytest.raises(BadDataError, match=r"data\.wrap=chat.*--map system="):
        run(none)
    assert run(over("wrapped", qwen, BRIEF, wrap="chat")).manifest.rows == 20
    assert run(replace(none, data=replace(none.data, map={"system": ""}))).manifest.rows == 20


def test_rounds_ask_what_stage_one_scores(over, qwen):
    def first(*rows, wrap):
        return split_prompts(over("cache", qwen, *rows, wrap=wrap)).train[0].text

    system = {"role": "system", "content": "Be brief."}
    assert first(BRIEF, wrap="chat") == (system, user("Q0?"))
    assert first(TEXTS, wrap="none") == "Q0?"
    with pytest.raises(BadDataError, match="already_rendered"):
        first([text(n, prompt=f"Human: Q{n}?") for n in range(20)], wrap="chat")


def calling(function, first=0):
    """Ten rows that call this function."""
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return [
        {"prompt": [user(f"Weather {n}?")], "chosen": [called], "rejected": "I do not know."}
        for n in range(first, first + 10)
    ]


AS_OBJECT = {"name": "weather", "arguments": {"city": "Łódź"}}
AS_TEXT = {"name": "weather", "arguments": json.dumps({"city": "Łódź"})}


def test_a_cache_whose_calls_an_earlier_version_rendered_otherwise_is_refused(
    over, hermes, monkeypatch
):
    taken = over("taken", hermes, calling(AS_OBJECT))
    converted = over("converted", hermes, calling(AS_TEXT))
    with monkeypatch.context() as earlier_version:
        earlier_version.setattr(ToolForms, "fit", lambda self, record: record)
        earlier = [run(one).manifest for one in (taken, converted)]
    assert all("tool_calls" not in one.fingerprint for one in earlier)
    again = run(taken)
    assert (again.was_complete, again.manifest.root) == (True, earlier[0].root)
    with pytest.raises(FingerprintError, match="rendered them otherwise: 10 of its 10 rows"):
        run(converted)
    made = run(over("new", hermes, calling(AS_TEXT)))
    assert made.manifest.fingerprint["tool_calls"] == "converted"


def test_a_cache_grows_by_the_first_rows_that_are_converted(over, hermes):
    first = run(over("cache", hermes, calling(AS_OBJECT))).manifest
    grown = run(over("cache", hermes, calling(AS_OBJECT), calling(AS_TEXT, first=10))).manifest
    assert (first.rows, grown.rows) == (10, 20)


def answered(number):
    """A conversation in JSON text, its answers 1 to 20 bytes long; two rows are plain text."""
    answers = chr(97 + number) * (number + 1), chr(65 + number) * (20 - number)
    cells = dict(zip(("prompt", "chosen", "rejected"), (f"Q{number}:", *answers), strict=True))
    if number < 18:
        turns = [user(f"Question {number}")], *([bot(answer)] for answer in answers)
        cells = {name: json.dumps(turn) for name, turn in zip(cells, turns, strict=True)}
    return cells | {"score_chosen": number, "score_rejected": "-0.5", "rating": 3}


def test_every_completion_that_is_whole_ends_with_its_stop_and_no_other_does(over, gemma):
    config = over("cache", gemma, [answered(number) for number in range(20)])
    # A prompt takes 26 or 27 tokens, so that answers of ten bytes and more are cut.
    tokens, cache = TokenOptions(max_length=36), replace(config.cache, kl_pairs=2)
    outcome = run(replace(config, tokens=tokens, cache=cache))
    number_of = load_tokenizer(gemma, TokenOptions()).backend.token_to_id
    turn, eos = map(number_of, ("<end_of_turn>", "<eos>"))
    stop = Stop(turn, "<end_of_turn>", "template")
    stops = Stops.of(outcome.manifest.fingerprint)
    assert stops == Stops(Stop(eos, "<eos>", "tokenizer"), stop, stop)
    decode, seen = decoder(gemma, stops.tokens), set()
    for stored in pq.read_table(Path(outcome.folder) / "data").to_pylist():
        number = stored["source"]["row"]
        assert stored["score"][:2] == [number, -0.5]
        answer = decode(stored["completion_ids"][0], True)  # without its stop
        assert answer == chr(97 + number) * len(answer)
        branches = zip(stored["completion_ids"], stored["cut"], stored["role"], strict=True)
        for ids, cut, role in branches:
            seen.add((bool(cut), role == Role.MISMATCHED))
            assert not {turn, eos} & set(ids[:-1])
            assert (ids[-1] in {turn, eos}) == (not cut)
            if not cut and role != Role.MISMATCHED:
                assert ids[-1] == (eos if number >= 18 else turn)
    assert seen == {(cut, mismatched) for cut in (True, False) for mismatched in (True, False)}
    notes = outcome.manifest.notes
    assert (notes["rows_of_conversations"], notes["rows_of_plain_text"]) == (18, 2)
    assert "note: 20 rows with scores not read in 'rating'" in outcome.text()
