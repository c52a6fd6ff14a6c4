"""The tiny world: what its preferences teach, its files, its tokenizer and its model."""

import re
from collections import Counter
from math import log

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from align.schemas.errors import UsageError
from align.stages.demo.preferences import draw_preferences, transcript
from align.stages.demo.tiny_tokenizer import make_tokenizer
from align.stages.demo.tiny_world import ModelShape, make_model
from align.stages.demo.verifier import score
from support.refusals import refuses
from support.worlds import make_data, make_world

DRAWN = list(draw_preferences(1000, seed=0))


def test_draws_are_different_repeatable_and_begin_alike_whatever_their_length():
    assert list(draw_preferences(50, seed=0)) == DRAWN[:50]
    assert list(draw_preferences(50, seed=1)) != DRAWN[:50]
    assert len({repr(each) for each in DRAWN}) == len(DRAWN)
    prompts = Counter(transcript(each.prompt) for each in DRAWN)
    assert sum(count > 1 for count in prompts.values()) > 50  # with other answers
    assert {sum(turn["role"] == "user" for turn in each.prompt) for each in DRAWN} == {1, 2, 3, 4}


def test_the_chosen_answer_alone_is_the_best_and_its_sums_are_right():
    places, sums = Counter(), 0
    for each in DRAWN:
        assert [answer for answer in each.answers if answer.score >= 1.0] == [each.chosen]
        places[each.answers.index(each.chosen)] += 1
        for answer in each.answers:
            told = re.findall(r"sum of (\d+) and (\d+) is (\d+)", answer.text)
            sums += len(told)
            for first, second, result in told:
                assert (int(first) + int(second) == int(result)) == (answer == each.chosen)
    assert places[0] < 0.75 * len(DRAWN)
    assert sums > 50


def read(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"), rows=60, seed=3)


def test_the_same_seed_writes_the_same_bytes_and_another_other_rows(files, tmp_path):
    make_data(tmp_path / "same", rows=60, seed=3)
    for path in (path for path in (tmp_path / "same").rglob("*") if path.is_file()):
        name = path.relative_to(tmp_path / "same")
        assert path.read_bytes() == (files.paired.parent / name).read_bytes(), name
    assert read(make_data(tmp_path / "other", rows=60, seed=4).paired) != read(files.paired)


def test_labelled_rows_hold_the_text_of_the_pairs(files):
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[column], "label": column == "chosen"}
        for pair in read(files.paired)
        for column in ("chosen", "rejected")
    ]
    assert read(files.unpaired) == labelled
    for text, chat in zip(labelled, read(files.unpaired_chat), strict=True):
        assert (transcript(chat["prompt"]), chat["label"]) == (text["prompt"], text["label"])
        assert chat["completion"][0]["content"] == text["completion"].strip()


def test_the_verifier_agrees_with_every_preference_between_polite_and_rude():
    for one in DRAWN[:200]:
        prompt = transcript(one.prompt)
        for answer in one.answers:
            # 1 is right and polite, 0.25 wrong and polite; 0.5 is curt and 0 is rude.
            assert score(prompt, f" {answer.text}", {}) == (answer.score in {1.0, 0.25})
    for text in (
        "Sure!",
        "Sure! Yes.",
        "It is 7. Sure!",
        "Sure! It is 7.\nUser: Thanks! What is the sum of 2 and 3?",
        "Gladly! It is 7. Now go away.",
        "",
    ):  # which only look polite
        assert score("User: What is the sum of 3 and 4?\nAssistant:", text, {}) == 0


SMALL = {"hidden_size": 64, "layers": 2, "intermediate_size": 128}


@pytest.fixture(scope="module")
def pretrained_world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), rows=20, pretrain_steps=30)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def test_training_again_saves_the_same_bytes(pretrained_world, tmp_path):
    make_tokenizer(tmp_path)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == sorted(path.name for path in pretrained_world.tokenizer.iterdir())
    for name in saved:
        assert (tmp_path / name).read_bytes() == (pretrained_world.model / name).read_bytes(), name


@pytest.mark.numeric
def test_a_seed_is_one_model_and_leaves_other_random_numbers_alone(tokenizer, tmp_path):
    torch.manual_seed(9)
    expected = torch.rand(3)
    weights = []
    for seed, tied in ((1, True), (1, True), (2, True), (2, False)):
        torch.manual_seed(9)
        folder = tmp_path / str(len(weights))
        shape = ModelShape(**SMALL, tied=tied)
        make_model(folder, tokenizer, shape=shape, pretrain_steps=2, seed=seed)
        assert torch.equal(torch.rand(3), expected)
        weights.append((folder / "model.safetensors").read_bytes())
        model = AutoModelForCausalLM.from_pretrained(folder)
        is_tied = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert is_tied == tied
    assert weights[0] == weights[1] != weights[2]


def mean_logp(model, tokenizer):
    """Of a token of conversations that no model has learned from, in blocks of 128 tokens."""
    ids = []
    for one in draw_preferences(100, seed=7_003):
        turns = [*map(dict, one.prompt), {"role": "assistant", "content": one.chosen.text}]
        ids += tokenizer.apply_chat_template(turns, return_dict=False)
    ids = torch.tensor(ids[: 16 * 128]).view(16, 128)
    with torch.no_grad():
        return -model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.numeric
def test_a_model_is_near_uniform_at_random_and_likelier_than_chance_once_it_is_pretrained(
    world, pretrained_world, tokenizer
):
    random = AutoModelForCausalLM.from_pretrained(world.model)
    assert mean_logp(random, tokenizer) == pytest.approx(-log(1024), abs=0.2)
    pretrained = AutoModelForCausalLM.from_pretrained(pretrained_world.model)
    assert -3.5 < mean_logp(pretrained, tokenizer) < 0
    assert pretrained.num_parameters() < 1_000_000


def test_a_world_stops_at_eos_and_is_not_overwritten(pretrained_world, tokenizer):
    config = GenerationConfig.from_pretrained(pretrained_world.model)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    kept = sorted(pretrained_world.model.parent.iterdir())
    with refuses(UsageError, pretrained_world.model.parent):
        make_world(pretrained_world.model.parent, rows=5, pretrain_steps=0)
    assert sorted(pretrained_world.model.parent.iterdir()) == kept
