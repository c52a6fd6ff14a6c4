"""Drawing with a loaded model: the same sample in any batch."""

import copy
import json

import pytest
import torch
from transformers import GenerationConfig

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.samples import Sampling
from align.stages.model.generate import Generator, PromptTokens, own_stops, warpers
from align.stages.model.keyed_noise import KeyedNoise, stream_of, uniforms
from align.stages.model.load import load_causal_lm
from align.stages.model.save import stop_generation_at
from support.families import HYBRID_FAMILIES, VOCABULARY, tiny_model
from support.refusals import refuses

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


def generator_of(model, *, tokens=10_000, stops=(1,), new=NEW, **sampling):
    how = Sampling(max_new_tokens=new, **sampling)
    return Generator(model, how, stops, tokens_per_batch=tokens)


def samples(drawing_model, prompt_ids, numbers=range(4), **how):
    return {
        (one.prompt, numbers[one.stream]): (one.tokens, one.has_stopped)
        for batch in generator_of(drawing_model, **how).draw(asked(prompt_ids, numbers))
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


def test_a_sample_is_its_own_and_the_same_for_any_batch_number_of_samples_and_order(
    drawing_model, prompt_ids
):
    whole = samples(drawing_model, prompt_ids, range(4))
    assert len(set(whole.values())) == len(whole)
    for tokens, numbers in ((1, range(2)), (60, range(4)), (10_000, range(3, -1, -1))):
        # In float32 a tie as near as its rounding is not among these.
        part = samples(drawing_model, prompt_ids, numbers, tokens=tokens)
        assert part == {key: whole[key] for key in part}
        assert len(part) == len(prompt_ids) * len(numbers)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_model_with_states_samples_as_one_token_after_another(family, prompt_ids):
    model = tiny_model(*HYBRID_FAMILIES[family])
    ids = [[token % VOCABULARY for token in one] for one in prompt_ids]
    sampling = {"temperature": 0.5}
    found = samples(model, ids, range(1), **sampling)
    for at, prompt in enumerate(ids):
        wanted = one_by_one(model, prompt, stream_of(str(at), 0, 0), Sampling(**sampling))
        assert found[at, 0] == wanted


@pytest.mark.parametrize("stop", [-1, "</s>", True, [2, None, 1.5]])
def test_a_stop_that_is_no_token_is_refused(tmp_path, stop):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": stop}))
    with refuses(UsageError, file, "eos_token_id"):
        own_stops(ModelOptions(path=str(tmp_path)))


def test_a_sample_ends_before_its_first_stop(drawing_model, prompt_ids):
    free = samples(drawing_model, prompt_ids, stops=())
    assert {(len(tokens), stopped) for tokens, stopped in free.values()} == {(NEW, False)}
    chosen = free[0, 0][0][4]
    found = samples(drawing_model, prompt_ids, stops=(chosen, 1))
    for key, (tokens, _) in free.items():
        end = next((at for at, token in enumerate(tokens) if token in (chosen, 1)), None)
        assert found[key] == (tokens[:end], end is not None)


def test_batches_hold_the_tokens_that_they_may(drawing_model, prompt_ids):
    for batch in generator_of(drawing_model, tokens=60).draw(asked(prompt_ids, range(2))):
        assert (max(LENGTHS[one.prompt] for one in batch) + NEW) * len(batch) <= 60


@pytest.mark.parametrize("room", [5, 0])
def test_a_batch_that_does_not_fit_is_halved_until_one_sample_does_not(
    drawing_model, prompt_ids, monkeypatch, room
):
    whole = samples(drawing_model, prompt_ids)
    sizes, generate = [], drawing_model.generate

    def small(**how):
        sizes.append(len(how["input_ids"]))
        if sizes[-1] > room:
            raise torch.OutOfMemoryError("no room")
        return generate(**how)

    monkeypatch.setattr(drawing_model, "generate", small)
    if room:
        assert samples(drawing_model, prompt_ids) == whole
        assert max(sizes[3:]) <= room
    else:
        with refuses(UsageError, "29 tokens", "--max-new-tokens"):
            samples(drawing_model, prompt_ids)
    assert sizes[:3] == [24, 12, 6]


def test_what_the_folder_asks_of_generation_changes_no_sample(drawing_model, prompt_ids):
    whole = samples(drawing_model, prompt_ids)
    other = copy.copy(drawing_model)
    other.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, repetition_penalty=5.0, top_k=1, eos_token_id=7
    )
    assert samples(other, prompt_ids) == whole


@pytest.mark.parametrize("is_composite", [False, True])
def test_a_saved_model_stops_at_its_own_eos_and_at_what_its_completions_ended_with(
    tmp_path, is_composite
):
    config = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None, "hidden_size": 8}
    config = {"text_config": config, "eos_token_id": None} if is_composite else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "generation_config.json"
    stop_generation_at([2], tmp_path, tmp_path)
    assert not file.exists()
    assert own_stops(ModelOptions(path=str(tmp_path))) == {2}
    stop_generation_at([5, 2], tmp_path, tmp_path)
    assert json.loads(file.read_text()) == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert own_stops(ModelOptions(path=str(tmp_path))) == {2, 5}
    for own, after in ((2, [2, 5]), ([2, 7], [2, 7, 5]), (None, [5]), ([5], [5])):
        file.write_text(json.dumps({"eos_token_id": own, "temperature": 0.6, "do_sample": True}))
        stop_generation_at([5], tmp_path, tmp_path)
        found = GenerationConfig.from_pretrained(tmp_path)
        assert (found.eos_token_id, found.temperature) == (after, 0.6)


# Noise by a hash: the generator it is built on, its distribution, and what it depends on.
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
SCORES = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf])


def splitmix(word):
    """The finalizer of splitmix64, in Python's integers."""
    word &= MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def by_hand(stream, position, token):
    state = splitmix(stream + (position + 1) * STEP)
    return ((splitmix(state + (token + 1) * STEP) >> 12) + 0.5) / 2**52  # in (0, 1): finite noise


def test_torch_hashes_by_splitmix64_as_python_does():
    # The first two outputs of splitmix64 seeded with 0, as its author's program prints them.
    assert [splitmix(STEP), splitmix(2 * STEP)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    streams = [stream_of("prompt", seed, 3) for seed in range(4)] + [0, -1, 2**63 - 1, -(2**63)]
    tokens = [0, 1, 17, 151_935]
    for position in (0, 1, 511, 100_000):
        found = uniforms(torch.tensor(streams), position, torch.tensor(tokens))
        wanted = [[by_hand(stream, position, token) for token in tokens] for stream in streams]
        assert found.tolist() == wanted


def test_a_stream_differs_by_prompt_seed_and_number():
    names = [(p, s, n) for p in ("1", "11") for s in range(20) for n in range(20)]
    assert len({stream_of(*name) for name in names}) == len(names)
    assert all(-(2**63) <= stream_of(*name) < 2**63 for name in names)


def drawn(streams, position=0):
    prompt_length = 5
    ids = torch.zeros((len(streams), prompt_length + position), dtype=torch.int64)
    noise = KeyedNoise(streams, prompt_length, torch.device("cpu"))
    return noise(ids, SCORES.expand(len(streams), -1)).argmax(dim=-1)


def test_tokens_are_drawn_with_their_probabilities_over_samples_and_over_positions():
    stream = [stream_of("p", 0, 0)]
    for tokens in (
        drawn([stream_of("p", 0, number) for number in range(20_000)]),
        torch.cat([drawn(stream, position=position) for position in range(2000)]),
    ):
        *counts, ruled_out = torch.bincount(tokens, minlength=6)
        assert ruled_out == 0
        expected = SCORES.softmax(0)[:-1] * len(tokens)
        chi_square = float(((torch.stack(counts) - expected) ** 2 / expected).sum())
        assert chi_square < 18.467  # of four degrees: exceeded by one in a thousand fair draws
