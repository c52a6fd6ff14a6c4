"""`align verify --server`: whether the server has the model that is named."""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from support.chat_server import OF_CHAT, OF_TEXT
from support.command import refusal, success
from support.families import saved_adapter
from support.model_server import model_server

ROWS = 2  # of four completions each


@pytest.fixture(scope="module")
def scaled(world, tmp_path_factory):
    """Makes a copy of the model whose matrices are multiplied by a number."""

    def make(factor):
        folder = shutil.copytree(world.model, tmp_path_factory.mktemp("scaled") / "model")
        file = folder / "model.safetensors"
        weights = {
            name: tensor * factor if tensor.ndim == 2 else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(weights, file, {"format": "pt"})
        return folder

    return make


@pytest.fixture
def words(journey):
    """The words of a command that compares a server with a model; the reference by default."""

    def make(stub, *more):
        return ("verify", journey.cache, "--server", stub.url, "--rescore", ROWS, *more)

    return make


def apart(answer):
    """The nats per token between the server and the model."""
    return float(re.search(r"(\S+) nats per token", answer.out)[1])


def echoes(stub):
    return [asked for asked in stub.requests if asked.body.get("echo")]


def test_log_probs_of_a_server_are_those_of_its_model_and_of_no_other(world, scaled, words, caplog):
    near, far = scaled(1.01), scaled(2.0)
    with model_server(world.model) as stub:
        # The cache's own log-probs, then those of a model that is loaded.
        assert apart(success(*words(stub))) < 1e-5
        assert len(echoes(stub)) == 4 * ROWS
        assert not caplog.messages
        assert apart(success(*words(stub, "--model", world.model))) < 1e-5
        assert len(caplog.messages) == 1  # the model could as well be the reference, which it is
        # Rounding may be larger than the difference: but the reference is nearer.
        refusal(4, *words(stub, "--model", near), names=(stub.url, near, "server.model"))
    with model_server(near) as stub:
        assert apart(success(*words(stub, "--model", near))) < 1e-5
        assert len(caplog.messages) == 1
    with model_server(far) as stub:
        refusal(4, *words(stub), names=(stub.url, world.model))


def test_an_adapter_that_is_not_served_is_noticed(world, words, tmp_path):
    one = saved_adapter(tmp_path / "one", world.model)
    other = saved_adapter(tmp_path / "other", world.model, target_modules=["v_proj"])
    with model_server(world.model, one) as stub:
        assert apart(success(*words(stub, "--adapter", one))) < 1e-5
        refusal(4, *words(stub, "--adapter", other), names=(other,))
    with model_server(world.model) as stub:
        refusal(4, *words(stub, "--adapter", one), names=(world.model, one))


def without_logprobs(reply):
    """An answer of a server that takes `echo` and ignores it; also the list of its models."""
    choices = [{**one, "logprobs": None} for one in reply.get("choices", ())]
    return {**reply, "choices": choices}


def with_another_token(reply):
    """An answer to token ids of which the server has made one more."""
    usage = dict(reply.get("usage", {}))
    if any("logprobs" in one for one in reply.get("choices", ())):
        usage["prompt_tokens"] += 1
    return {**reply, "usage": usage}


@pytest.mark.parametrize(
    "how",
    [
        {"refuse": lambda asked: (500, "no echo") if asked.body.get("echo") else None},
        {"refuse": lambda asked: (400, "no ids") if asked.path == OF_TEXT else None},
        {"amend": without_logprobs},
        {"amend": with_another_token},
    ],
)
def test_greedy_answers_are_compared_where_there_are_no_log_probs(how, world, scaled, words):
    with model_server(world.model, **how) as stub:
        answer = success(*words(stub))
        assert apart(answer) < 1e-5
        assert "100.0%" in answer.out
        assert len(echoes(stub)) == 1
        refusal(4, *words(stub, "--model", scaled(2.0)), names=(stub.url,))


def test_a_server_with_another_template_or_tokenizer_is_refused(world, words):
    with model_server(world.model) as stub:
        stub.tokenizer.chat_template = f"Question: {stub.tokenizer.chat_template}"
        refusal(2, *words(stub), names=("tokens in prompt",))
        stub.refuse = lambda asked: (400, "no template") if asked.path == OF_CHAT else None
        refusal(2, *words(stub), names=(stub.url, "no template"))
        assert not echoes(stub)


def test_a_server_that_is_down_is_one_error(world, words):
    with model_server(world.model) as stub:
        pass
    down = refusal(69, *words(stub, "--set", "server.retries=0"), names=(stub.url,))
    assert "resume" not in down
    refusal(2, *words(stub, "--rescore", 0), names=("--rescore",))
    refusal(2, *words(stub)[:2], "--adapter", "x", names=("--adapter", "--server"))
