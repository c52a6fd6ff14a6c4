"""Where a saved model stops: at its own EOS, and at what its completions ended with."""

import json

import pytest
from transformers import GenerationConfig

from align.stages.model.save import stop_generation_at


@pytest.fixture
def source_and_target(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    config = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None, "hidden_size": 8}
    (source / "config.json").write_text(json.dumps(config))
    return source, target


@pytest.mark.parametrize(("own", "after"), [(2, [2, 5]), ([2, 7], [2, 7, 5]), (None, [5])])
def test_the_templates_stop_is_added_to_the_tokens_that_end_generation(
    source_and_target, own, after
):
    source, target = source_and_target
    settings = {"eos_token_id": own, "temperature": 0.6, "do_sample": True}
    (target / "generation_config.json").write_text(json.dumps(settings))
    stop_generation_at([5], source, target)
    found = GenerationConfig.from_pretrained(target)
    assert (found.eos_token_id, found.temperature) == (after, 0.6)


def test_a_model_without_generation_config_gets_one_from_its_config(source_and_target):
    source, target = source_and_target
    stop_generation_at([5, 2], source, target)
    written = json.loads((target / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_nothing_is_written_when_generation_ends_there_already(source_and_target):
    source, target = source_and_target
    stop_generation_at([2], source, target)
    assert not list(target.iterdir())
    text = '{"eos_token_id": [5,   2]}'
    (target / "generation_config.json").write_text(text)
    stop_generation_at([2, 5], source, target)
    assert (target / "generation_config.json").read_text() == text
