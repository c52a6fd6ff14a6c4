"""A real server: `transformers serve`, with a tiny model that it has by its folder."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from align.schemas.round_options import ServerOptions
from align.schemas.samples import Prompt, Sampling
from align.stages.server.policy_server import policy_server
from align.stages.server.server_sampler import ServerSampler
from support.asking import chat, collected, wanted_of
from support.command import success
from support.patience import PATIENCE
from support.refusals import require_names

LENGTH = 12
TEXTS = [Prompt("Question: which is larger, two or nine?\nAnswer:"), Prompt("The sea is")]
CHATS = [chat("which is larger, two or nine?"), chat("say hello")]


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    """The address of the server that `rounds.serve` starts, and its model, which is to sample."""
    tmp_path = tmp_path_factory.mktemp("served")
    model = shutil.copytree(world.model, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))
    # It lists what is in the hub's cache, and fails where there is none.
    (tmp_path / "hub").mkdir()
    serve = f"{Path(sys.executable).with_name('transformers')} serve {{model}} --port {{port}}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HOME", str(tmp_path))
        patched.setenv("HF_HUB_OFFLINE", "1")
        with policy_server(serve, str(model), log=tmp_path / "log", timeout=PATIENCE) as url:
            yield url, str(model)


def test_a_real_server_says_what_transformers_generates(served):
    import torch  # noqa: PLC0415 - takes seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    url, folder = served
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )

    def ids_of(prompt):
        """The token ids of a prompt, as we render it."""
        if isinstance(prompt.text, str):
            return tokenizer(prompt.text)["input_ids"]
        how = {"add_generation_prompt": True, "return_dict": False}
        return tokenizer.apply_chat_template([dict(one) for one in prompt.text], **how)

    options = ServerOptions(url=url, model=folder, revision="one", retries=1, concurrency=1)
    sampler = ServerSampler(options, lambda prompt: len(ids_of(prompt)))

    def drawn(prompts, n, **sampling):
        opened = sampler.open(Sampling(max_new_tokens=LENGTH, **sampling))
        return collected(opened.sample(wanted_of(prompts, n)))

    samples, refused = drawn([*TEXTS, *CHATS], 1, temperature=0.0)
    assert not refused
    for prompt in [*TEXTS, *CHATS]:
        ids = ids_of(prompt)
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH)
        completion = out[0, len(ids) :]
        sample = samples[prompt.key, 0]
        assert sample.text == tokenizer.decode(completion, skip_special_tokens=True)
        assert (sample.prompt_tokens, sample.completion_tokens) == (len(ids), len(completion))
        assert sample.finish == ("length" if len(completion) == LENGTH else "stop")
    # Each number has a seed of its own, and the same sample each time.
    warm = drawn(CHATS[:1], 4, temperature=1.0)[0]
    assert len({sample.text for sample in warm.values()}) == 4
    assert drawn(CHATS[:1], 4, temperature=1.0)[0] == warm
    samples, refused = drawn(CHATS, 1, top_k=5)
    assert (samples, len(refused)) == ({}, len(CHATS))
    require_names(refused[0].reason, "422", "top_k")


def test_verify_compares_the_answers_of_a_real_server(served, journey):
    """It gives no log-probs of prompts."""
    url, folder = served
    words = ("verify", journey.cache, "--server", url, "--server-model", folder, "--rescore", 4)
    assert "100.0%" in success(*words, "--model", folder).out
