"""The tokenizer, the model and the folder of the tiny world."""

import json
from dataclasses import astuple
from math import log

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from align.schemas.errors import UsageError
from align.stages.demo.preferences import draw_preferences, transcript
from align.stages.demo.tiny_tokenizer import make_tokenizer
from align.stages.demo.tiny_world import ModelShape, make_model, make_world

SMALL = {"hidden_size": 64, "layers": 2, "intermediate_size": 128}
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "What does a cow say?"}
ASSISTANT = {"role": "assistant", "content": "Sure! A cow says moo."}
TOOL = {"type": "function", "function": {"name": "listen", "parameters": {"animal": "string"}}}


@pytest.fixture(scope="module")
def pretrained_world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), rows=300, pretrain_steps=30)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def render(tokenizer, *messages, **options):
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def test_training_again_saves_the_same_bytes(pretrained_world, tmp_path):
    make_tokenizer(tmp_path)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == sorted(path.name for path in pretrained_world.tokenizer.iterdir())
    for name in saved:
        assert (tmp_path / name).read_bytes() == (pretrained_world.model / name).read_bytes(), name


def test_any_text_comes_back_from_its_ids(tokenizer):
    for text in (
        "Zoë walks to the café 😊",
        "  two  spaces\n\n",
        "\u4f60\u597d",
        "<|im_start|>user",
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


def test_text_and_conversations_begin_with_one_bos_and_only_turns_end_in_eos(tokenizer):
    text = tokenizer("A cow says moo.").input_ids
    chat = tokenizer.apply_chat_template([SYSTEM, USER, ASSISTANT], return_dict=False)
    for ids, turns in ((text, 0), (chat, 3)):
        assert (ids[0], ids.count(tokenizer.bos_token_id)) == (tokenizer.bos_token_id, 1)
        assert ids.count(tokenizer.eos_token_id) == turns
    assert chat[-1] == tokenizer.eos_token_id


def test_the_template_writes_turns_in_this_form(tokenizer):
    answered = render(tokenizer, SYSTEM, USER, ASSISTANT)
    assert answered == (
        "<|bos|><|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhat does a cow say?<|im_end|>\n"
        "<|im_start|>assistant\nSure! A cow says moo.<|im_end|>"
    )
    waiting = render(tokenizer, SYSTEM, USER, add_generation_prompt=True)
    assert answered == f"{waiting}{ASSISTANT['content']}<|im_end|>"
    for messages in ([SYSTEM, USER], [USER]):
        text = render(tokenizer, *messages, tools=[TOOL])
        system_turn = text.removeprefix("<|bos|><|im_start|>system\n").split("<|im_end|>")[0]
        assert json.loads(system_turn.splitlines()[-1]) == TOOL
        assert system_turn.startswith("Be kind.") == (SYSTEM in messages)
        assert text.count("<|im_start|>") == 2


def test_no_token_spans_prompt_and_completion(tokenizer):
    for each in draw_preferences(50, seed=5):
        prompt = transcript(each.prompt)
        prompt_ids = tokenizer(prompt).input_ids
        assert tokenizer(f"{prompt} {each.chosen.text}").input_ids[: len(prompt_ids)] == prompt_ids


@pytest.mark.numeric
def test_a_seed_is_one_model_near_uniform_and_leaves_other_random_numbers_alone(
    tokenizer, tmp_path
):
    torch.manual_seed(9)
    expected = torch.rand(3)
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(9)
        folder = tmp_path / str(number)
        made = make_model(folder, tokenizer, shape=ModelShape(**SMALL), pretrain_steps=2, seed=seed)
        assert made.logp_before == pytest.approx(-log(1024), abs=0.2)
        assert torch.equal(torch.rand(3), expected)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.numeric
def test_pretraining_makes_good_and_bad_answers_likelier_than_chance(pretrained_world, tokenizer):
    assert pretrained_world.pretraining.logp_before < -6.5  # uniform: -6.9
    assert -3.5 < pretrained_world.pretraining.logp_after < 0
    assert pretrained_world.pretraining.num_parameters < 1_000_000
    model = AutoModelForCausalLM.from_pretrained(pretrained_world.model)

    def logp_per_token(messages, answer):
        start = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)])
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1)
        return logps.gather(1, ids[0, 1:, None])[len(start) - 1 :].mean().item()

    for side in ("chosen", "rejected"):
        drawn = draw_preferences(30, seed=11)
        logps = [logp_per_token([*map(dict, one.prompt)], getattr(one, side)) for one in drawn]
        assert -4.5 < sum(logps) / 30 < 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_only_when_tied(tokenizer, tmp_path, tied):
    make_model(tmp_path, tokenizer, shape=ModelShape(**SMALL, tied=tied), pretrain_steps=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == tied


def test_a_world_is_whole_and_its_model_stops_at_eos(pretrained_world, tokenizer):
    assert all(path.exists() for path in astuple(pretrained_world.data))
    config = GenerationConfig.from_pretrained(pretrained_world.model)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        make_world(tmp_path, rows=5, pretrain_steps=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
