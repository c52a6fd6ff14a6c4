"""`align push` to a Hub on loopback, by huggingface_hub's own client."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.command import refusal, success
from support.stub_hub import TOKEN, serving

# The client's own way to send a large file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
SHORT = ("--max-steps", 1, "--no-mlflow", "--eval-fraction", 0)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process may write to; large files are sent by LFS, not by xet."""
    constants = huggingface_hub.constants
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def whole(course, tmp_path_factory):
    """A finished run of all weights, which no test changes."""
    run = tmp_path_factory.mktemp("whole") / "run"
    course.run(run, *SHORT)
    return run


def end_of(hub, branch="main", name="you/tiny"):
    """The last commit of a branch, and its files."""
    repo = hub.repos[name]
    return repo.refs[branch], repo.commits[repo.refs[branch]]


def saved(files, folder):
    """A folder of these files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_pushed_model_is_private_loads_and_names_no_path_of_this_machine(
    hub, whole, course, tmp_path
):
    run = shutil.copytree(whole, tmp_path / "run")
    for name in ("optimizer.pt", "trainer_state.json", "train.log", ".hidden.safetensors"):
        (run / "model" / name).write_text("not for others")
    (run / "model" / "sub").mkdir()
    (run / "model" / "sub" / "config.json").write_text("{}")
    said = success("push", run, "you/tiny", "--message", "the first").out
    commit, files = end_of(hub)
    assert (hub.repos["you/tiny"].private, hub.messages[commit]) == (True, "the first")
    assert f"{hub.url}/you/tiny/commit/{commit}" in said
    assert f"--model hf://you/tiny@{commit}" in said
    assert files.keys() == {path.name for path in (whole / "model").iterdir()} | {".gitattributes"}
    front = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert front["library_name"] == "transformers"
    here = [str(path).encode() for path in (Path.home(), whole.parent, course.folder)]
    assert not [name for name in files for path in here if path in files[name]]
    folder = saved(files, tmp_path / "pushed")
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    stored = load_file(whole / "model" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_second_push_adds_what_changed_and_removes_old_shards(hub, whole, tmp_path):
    success("push", whole, "you/tiny")
    first, files = end_of(hub)
    assert f"commit/{first}" in success("push", whole, "you/tiny").out
    assert end_of(hub)[0] == first
    old = {"model-00001-of-00002.safetensors": b"old", "adapter_config.json": b"{}"}
    kept = {"LICENSE": b"mine", "picture.png": b"png", "gguf/model.safetensors": b"other"}
    before = hub.repos["you/tiny"].commit(files | old | kept)
    run = shutil.copytree(whole, tmp_path / "run")
    card = run / "model" / "README.md"
    card.write_text(card.read_text() + "My own words.")
    sent = len(hub.requests)
    success("push", run, "you/tiny", "--revision", "next")
    assert end_of(hub) == (before, files | old | kept)
    assert end_of(hub, "next")[1] == files | kept | {"README.md": card.read_bytes()}
    assert not [one for one in hub.requests[sent:] if one.method == "PUT"]


def test_an_adapter_is_pushed_without_the_folder_of_its_base(hub, course, tmp_path, monkeypatch):
    run = tmp_path / "run"
    course.run(run, *SHORT, "--lora", "--set", "lora.rank=4")
    said = success("push", run, "you/tiny", "--public").out
    commit, files = end_of(hub)
    assert not hub.repos["you/tiny"].private
    assert f"--model {course.model} --adapter hf://you/tiny@{commit}" in said
    settings = json.loads(files["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["r"]) == (course.model.parent.name, 4)
    assert not [name for name in files if str(course.folder).encode() in files[name]]
    assert "adapter_model.safetensors" in files

    # A base of the Hub lies in the client's cache, and is named as on the Hub.
    snapshot = tmp_path / "hub" / "models--acme--base" / "snapshots" / ("ab" * 20)
    shutil.copytree(course.model, snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config = run / "model" / "adapter_config.json"
    config.write_text(json.dumps(settings | {"base_model_name_or_path": str(snapshot)}))
    assert (
        f"--model hf://acme/base@{'ab' * 20} " in success("push", run, "you/tiny", "--public").out
    )
    settings = json.loads(end_of(hub)[1]["adapter_config.json"])
    found = (settings["base_model_name_or_path"], settings["revision"])
    assert found == ("acme/base", "ab" * 20)


def test_what_cannot_be_pushed_is_one_message_and_publishes_nothing(
    hub, whole, tmp_path, monkeypatch
):
    hub.repo("you/open").commit({"README.md": b""})
    hub.repo("you/closed", private=True).commit({"README.md": b""})
    refusal(2, "push", whole, "you/open", names=("you/open", "--public"))
    refusal(2, "push", whole, "you/closed", "--public", names=("you/closed", "--public"))
    refusal(2, "push", whole, "tiny", names=("OWNER/NAME",))
    refusal(2, "push", whole, "you/ti ny", names=("you/ti ny",))
    refusal(2, "push", whole, "acme/tiny", names=("acme/tiny", "403"))
    unfinished = shutil.copytree(whole, tmp_path / "unfinished")
    (unfinished / "_align" / "ending.json").unlink()
    refusal(2, "push", unfinished, "you/tiny", names=("--resume auto",))
    monkeypatch.setenv("HF_TOKEN", "")
    refusal(2, "push", whole, "you/tiny", names=("HF_TOKEN", "hf auth login"))
    monkeypatch.setenv("HF_TOKEN", "hf_ofSomebodyElse")
    refusal(2, "push", whole, "you/tiny", names=("you/tiny", "401"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.status = 500
    refusal(69, "push", whole, "you/tiny", names=("you/tiny", "500"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refusal(2, "push", whole, "you/tiny", names=("you/tiny", "HF_HUB_OFFLINE"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    refusal(69, "push", whole, "you/tiny", names=("you/tiny",))
    assert hub.repos.keys() == {"you/open", "you/closed"}
    assert all(len(repo.commits) == 1 for repo in hub.repos.values())
