"""Drawing with a loaded model: the same sample in any batch, the prompt computed once."""

import copy
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, MambaConfig

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.samples import Sampling
from align.stages.model import generate as module
from align.stages.model.generate import Generator, PromptTokens, left_padded, own_stops, warpers
from align.stages.model.keyed_noise import KeyedNoise, stream_of
from align.stages.model.load import load_causal_lm

LENGTHS = (3, 9, 1, 5, 17, 4)
NEW = 12


@pytest.fixture(scope="module")
def drawing_model(world):
    return load_causal_lm(ModelOptions(path=str(world.model)))


@pytest.fixture(scope="module")
def prompt_ids():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(8, 300, (length,), generator=draw).tolist() for length in LENGTHS]


def asked(prompt_ids, numbers):
    return [
        PromptTokens(ids, [stream_of(str(at), 0, number) for number in numbers])
        for at, ids in enumerate(prompt_ids)
    ]


def samples(drawing_model, prompt_ids, numbers=range(4), tokens=10_000, stops=(1,), **sampling):
    how = Sampling(max_new_tokens=NEW, **sampling)
    generator = Generator(drawing_model, how, stops, tokens_per_batch=tokens)
    return {
        (one.prompt, numbers[one.stream]): (one.tokens, one.has_stopped)
        for batch in generator.draw(asked(prompt_ids, numbers))
        for one in batch
    }


def one_by_one(drawing_model, ids, stream, sampling):
    """A token at a time without a cache: the definition."""
    tokens = torch.tensor([ids])
    noise = KeyedNoise([stream], len(ids), torch.device("cpu"))
    for _ in range(NEW):
        with torch.inference_mode():
            scores = drawing_model(input_ids=tokens, use_cache=False).logits[:, -1].float()
        for warp in warpers(sampling):
            scores = warp(tokens, scores)
        if sampling.temperature:
            scores = noise(tokens, scores)
        token = scores.argmax(dim=-1, keepdim=True)
        if token.item() == 1:
            return tuple(tokens[0, len(ids) :].tolist()), True
        tokens = torch.cat([tokens, token], dim=1)
    return tuple(tokens[0, len(ids) :].tolist()), False


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"temperature": 0.0}]
)
def test_a_sample_is_what_one_token_after_another_gives(drawing_model, prompt_ids, how):
    found = samples(drawing_model, prompt_ids, range(2), **how)
    wanted = {
        (at, number): one_by_one(drawing_model, ids, stream_of(str(at), 0, number), Sampling(**how))
        for at, ids in enumerate(prompt_ids)
        for number in range(2)
    }
    assert found == wanted


def test_a_sample_is_the_same_for_any_batch_number_of_samples_and_order(drawing_model, prompt_ids):
    whole = samples(drawing_model, prompt_ids, range(4))
    for tokens, numbers in (
        (1, range(4)),
        (60, range(4)),
        (10_000, range(1)),
        (10_000, range(2, 4)),
        (10_000, range(3, -1, -1)),
    ):
        # In float32 a tie as near as its rounding is not among these.
        part = samples(drawing_model, prompt_ids, numbers, tokens)
        assert part == {key: whole[key] for key in part}
        assert len(part) == len(prompt_ids) * len(numbers)


def test_different_numbers_and_seeds_give_different_samples(drawing_model, prompt_ids):
    found = samples(drawing_model, prompt_ids, range(8))
    assert len(set(found.values())) == len(found)


def test_a_sample_ends_before_its_first_stop(drawing_model, prompt_ids):
    free = samples(drawing_model, prompt_ids, stops=())
    assert not any(has_stopped for _, has_stopped in free.values())
    assert {len(tokens) for tokens, _ in free.values()} == {NEW}
    chosen = free[0, 0][0][4]
    found = samples(drawing_model, prompt_ids, stops=(chosen, 1))
    for key, (tokens, _) in free.items():
        end = next((at for at, token in enumerate(tokens) if token in (chosen, 1)), None)
        assert found[key] == (tokens[:end], end is not None)


def test_batches_are_sorted_by_length_and_hold_the_tokens_that_they_may(drawing_model, prompt_ids):
    generator = Generator(drawing_model, Sampling(max_new_tokens=NEW), (1,), tokens_per_batch=60)
    batches = [*generator.draw(asked(prompt_ids, range(2)))]
    sizes = [(max(LENGTHS[one.prompt] for one in batch) + NEW) * len(batch) for batch in batches]
    assert max(sizes) <= 60
    order = [LENGTHS[one.prompt] for batch in batches for one in batch]
    assert order == sorted(order, reverse=True)


def test_a_batch_that_does_not_fit_is_halved(drawing_model, prompt_ids, monkeypatch):
    whole = samples(drawing_model, prompt_ids)
    sizes = []
    generate = module._generate

    def small(drawing_model, ids, mask, repeated, **how):
        if "logits_processor" in how:
            sizes.append(len(repeated))
            if len(repeated) > 5:
                raise torch.OutOfMemoryError("no room")
        return generate(drawing_model, ids, mask, repeated, **how)

    monkeypatch.setattr(module, "_generate", small)
    assert samples(drawing_model, prompt_ids) == whole
    assert sizes[:3] == [24, 12, 6]
    assert max(sizes[3:]) <= 5


def test_a_sample_for_which_there_is_no_room_at_all_is_refused(
    drawing_model, prompt_ids, monkeypatch
):
    generator = Generator(drawing_model, Sampling(max_new_tokens=NEW), (1,), tokens_per_batch=99)

    def none(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(module, "_generate", none)
    with pytest.raises(UsageError, match="one sample of 29 tokens.*--max-new-tokens"):
        [*generator.draw(asked(prompt_ids, range(2)))]


def test_a_prompt_is_computed_once_for_all_its_samples(drawing_model, prompt_ids):
    generator = Generator(
        drawing_model, Sampling(max_new_tokens=NEW), (1,), tokens_per_batch=10_000
    )
    assert generator.shares_prompts
    shapes = []
    hook = drawing_model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    with hook:
        [*generator.draw(asked(prompt_ids, range(8)))]
    assert shapes[0] == (len(prompt_ids), max(LENGTHS) - 1)
    assert {length for _, length in shapes[1:]} == {1}
    assert {rows for rows, _ in shapes[1:]} == {8 * len(prompt_ids)}


def made(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_whose_cache_cannot_be_repeated_computes_prompts_again_and_says_so(caplog):
    mamba = made(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4))
    generator = Generator(mamba, Sampling(max_new_tokens=3), (1,), tokens_per_batch=999)
    assert not generator.shares_prompts
    assert "computes each prompt once for every sample" in caplog.text
    found = [one for batch in generator.draw(asked([[5, 6, 7]], range(3))) for one in batch]
    assert len(found) == 3


def test_a_wrong_cache_is_noticed(drawing_model, monkeypatch, caplog):
    cache_of = module._cache_of

    def spoiled(*given):
        cache = cache_of(*given)
        cache.layers[0].values = cache.layers[0].values.roll(1, dims=0)
        return cache

    monkeypatch.setattr(module, "_cache_of", spoiled)
    with caplog.at_level(logging.WARNING, logger="align"):
        assert not Generator(drawing_model, Sampling(), (1,), tokens_per_batch=9).shares_prompts
    assert "off by" in caplog.text


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},  # learned positions
    "bloom": {"n_layer": 2, "n_head": 2},  # positions from the mask
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4},  # some layers slide
    "lfm2": {},  # some layers are convolutions
}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_shared_in_caches_of_many_kinds(family):
    own = made(AutoConfig.for_model(family, **SMALL | FAMILIES[family]))
    assert Generator(own, Sampling(max_new_tokens=8), (1,), tokens_per_batch=999).shares_prompts


def test_what_the_folder_asks_of_generation_changes_no_sample(drawing_model, prompt_ids):
    whole = samples(drawing_model, prompt_ids)
    other = copy.copy(drawing_model)
    other.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, repetition_penalty=5.0, top_k=1, eos_token_id=7
    )
    assert samples(other, prompt_ids) == whole


def test_padding_is_on_the_left():
    ids, mask = left_padded([[1, 2, 3], [4]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_stops_of_a_folder_are_those_of_its_generation_config_too(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert own_stops(ModelOptions(path=str(tmp_path))) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert own_stops(ModelOptions(path=str(tmp_path))) == {2, 3, 4}
