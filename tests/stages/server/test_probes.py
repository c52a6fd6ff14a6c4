import pytest

from align.schemas.errors import FingerprintError, UsageError
from align.schemas.round_options import ServerOptions
from align.stages.server.probes import PROBES, require_same_probes
from support.asking import echo, sampler_of_stub
from support.chat_server import OF_CHAT, OF_TEXT, chat_server

OPTIONS = ServerOptions(url="http://host/v1", revision="one")
KEPT = {f"chat: {i}": f"answer {i}" for i in range(6)}


def changed(count):
    """Answers of which so many are other ones."""
    return {name: f"{text}!" if i < count else text for i, (name, text) in enumerate(KEPT.items())}


@pytest.mark.parametrize(("is_chat", "path"), [(True, OF_CHAT), (False, OF_TEXT)])
def test_probes_are_asked_greedily_and_in_the_way_of_the_prompts(is_chat, path):
    with chat_server(echo) as stub:
        probes = sampler_of_stub(stub).probes(chat=is_chat)
    assert {asked.path for asked in stub.requests} == {path}
    assert {asked.body["temperature"] for asked in stub.requests} == {0.0}
    assert {asked.body["max_tokens"] for asked in stub.requests} == {16}
    assert sorted(asked.last for asked in stub.requests) == sorted(PROBES)
    kind = "chat" if is_chat else "text"
    assert {*probes} == {f"{kind}: {text}" for text in PROBES}
    assert all(f"to {name[6:]} " in answer for name, answer in probes.items())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_other_answers_are_logged_for_few_servers_compute_the_same_in_every_batch(
    count, caplog
):
    require_same_probes(KEPT, changed(count), OPTIONS)
    assert f"{count} of 6 probes are answered otherwise" in caplog.text


@pytest.mark.parametrize("count", [4, 5, 6])
def test_most_other_answers_are_another_model_under_the_same_name(count):
    with pytest.raises(FingerprintError, match=f"{count} of 6 probes") as refused:
        require_same_probes(KEPT, changed(count), OPTIONS)
    assert "revision 'one'" in str(refused.value)
    assert "state another server.revision" in str(refused.value)


def test_no_change_is_not_spoken_of(caplog):
    require_same_probes(KEPT, dict(KEPT), OPTIONS)
    require_same_probes(KEPT, {"text: 1": "of another kind"}, OPTIONS)
    assert not caplog.text


def test_a_server_that_refuses_short_prompts_is_of_no_use():
    with (
        chat_server(echo, refuse=lambda _: (400, "no template")) as stub,
        pytest.raises(UsageError, match="refuses every request: 400 no template"),
    ):
        sampler_of_stub(stub).probes(chat=True)
