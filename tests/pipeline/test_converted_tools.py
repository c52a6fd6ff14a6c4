"""Caches of rows whose calls of tools an earlier version rendered as they were given."""

import json
from dataclasses import replace

import pytest

from align.schemas.config import DataOptions, ModelOptions
from align.schemas.errors import FingerprintError
from align.stages.data.tool_forms import ToolForms
from support.stage_one import run
from support.tool_templates import HERMES, chat_tokenizer

ARGUMENTS = {"city": "Łódź"}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tok"), HERMES)


def row(number, arguments):
    function = {"name": "weather", "arguments": arguments}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    prompt = [{"role": "user", "content": f"Weather {number}?"}]
    return {"prompt": prompt, "chosen": [called], "rejected": "I do not know."}


@pytest.fixture
def calling(config, hermes, tmp_path):
    """A config over files of such rows: the arguments of each file's calls are given."""

    def make(*files):
        paths = []
        for number, arguments in enumerate(files):
            rows = [row(10 * number + each, arguments) for each in range(10)]
            path = tmp_path / f"{number}.jsonl"
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
            paths.append(str(path))
        model, data = ModelOptions(path=str(hermes)), DataOptions(files=paths)
        return replace(config, model=model, data=data)

    return make


def as_earlier(monkeypatch, config):
    with monkeypatch.context() as earlier:
        earlier.setattr(ToolForms, "fit", lambda self, record: record)
        return run(config)


def test_a_cache_of_calls_that_are_converted_now_is_not_called_complete(calling, monkeypatch):
    config = calling(json.dumps(ARGUMENTS))
    as_earlier(monkeypatch, config)
    with pytest.raises(FingerprintError, match="rendered them otherwise: 10 of its 10 rows"):
        run(config)
    other = replace(config, cache=replace(config.cache, output=config.cache.output + "-2"))
    assert run(other).manifest.fingerprint["tool_calls"] == "converted"


def test_a_cache_of_calls_that_are_not_converted_stays_complete(calling, monkeypatch):
    config = calling(ARGUMENTS)
    earlier = as_earlier(monkeypatch, config)
    again = run(config)
    assert again.was_complete
    assert again.manifest.root == earlier.manifest.root
    assert "tool_calls" not in earlier.manifest.fingerprint


def test_a_cache_grows_by_the_first_rows_that_are_converted(calling):
    first = run(calling(ARGUMENTS)).manifest
    grown = run(calling(ARGUMENTS, json.dumps(ARGUMENTS))).manifest
    assert (first.rows, grown.rows) == (10, 20)
