"""A real server: `transformers serve`, with a tiny model that it has by its folder."""

import json
import shutil

import pytest

from align.schemas.errors import UsageError
from align.schemas.round_options import ServerOptions
from align.schemas.samples import Prompt, Sampling
from align.stages.server.probes import require_same_probes
from align.stages.server.server_sampler import ServerSampler
from support.asking import chat, collected, wanted_of
from support.transformers_server import transformers_server

pytestmark = pytest.mark.slow  # a server that imports transformers

LENGTH = 12
TEXTS = [Prompt("Question: which is larger, two or nine?\nAnswer:"), Prompt("The sea is")]
CHATS = [chat("which is larger, two or nine?"), chat("say hello")]


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    """The server's address, and its model, whose own settings are to sample."""
    folder = tmp_path_factory.mktemp("served")
    model = shutil.copytree(world.model, folder / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))
    with transformers_server(model, folder) as url:
        yield url, str(model)


@pytest.fixture(scope="module")
def served_tokenizer(served):
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    return AutoTokenizer.from_pretrained(served[1])


@pytest.fixture(scope="module")
def rendered(served_tokenizer):
    """The token ids of a prompt, as we render it."""

    def ids_of(prompt):
        if isinstance(prompt.text, str):
            return served_tokenizer(prompt.text)["input_ids"]
        text = served_tokenizer.apply_chat_template(
            [dict(one) for one in prompt.text], add_generation_prompt=True, tokenize=False
        )
        return served_tokenizer(text, add_special_tokens=False)["input_ids"]

    return ids_of


def sampler_for(served, count_tokens=None, **more):
    url, model = served
    usual = {"url": url, "model": model, "revision": "one", "retries": 1}
    return ServerSampler(ServerOptions(**(usual | more)), count_tokens)


def test_greedy_samples_are_what_transformers_generates_here(served, served_tokenizer, rendered):
    import torch  # noqa: PLC0415 - takes seconds
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(served[1])
    sampler = sampler_for(served, lambda prompt: len(rendered(prompt)))
    greedy = Sampling(temperature=0.0, max_new_tokens=LENGTH)
    samples, refused = collected(sampler.open(greedy).sample(wanted_of([*TEXTS, *CHATS], 1)))
    assert not refused
    for prompt in [*TEXTS, *CHATS]:
        ids = rendered(prompt)
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH)
        completion = out[0, len(ids) :]
        sample = samples[prompt.key, 0]
        assert sample.text == served_tokenizer.decode(completion, skip_special_tokens=True)
        assert sample.prompt_tokens == len(ids)
        assert sample.completion_tokens == len(completion)
        assert sample.finish == ("length" if len(completion) == LENGTH else "stop")


def test_each_number_has_a_seed_of_its_own_and_the_same_sample_each_time(served):
    def twice():
        sampler = sampler_for(served, concurrency=1)
        sampling = Sampling(temperature=1.0, max_new_tokens=LENGTH)
        return collected(sampler.open(sampling).sample(wanted_of(CHATS[:1], 4)))[0]

    first, again = twice(), twice()
    assert first == again
    assert len({sample.text for sample in first.values()}) == 4


def test_its_probes_are_the_same_each_time(served):
    sampler = sampler_for(served)
    first = sampler.probes(chat=True)
    assert len(first) == 6
    require_same_probes(first, sampler.probes(chat=True), ServerOptions(revision="one"))


def test_what_it_does_not_know_is_refused_by_name(served):
    sampler = sampler_for(served)
    with pytest.raises(UsageError, match="422 Unexpected fields in the request: .*top_k"):
        list(sampler.open(Sampling(top_k=5)).sample(wanted_of(CHATS, 1)))
