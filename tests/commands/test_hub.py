"""Models and data sets of the Hugging Face Hub, by huggingface_hub's own client."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from align.pipeline.options.settings import load_settings
from align.schemas.errors import UsageError
from align.schemas.safe_text import mask_secrets_of, redacted
from align.stages.data.files import open_inputs
from align.stages.storage.cache import Cache
from align.stages.tracking.run_texts import data_name, model_name
from support.refusals import refuses, require_names
from support.stub_hub import TOKEN
from support.trainings import Person, weights

SHORT = ("--method", "dpo", "--batch-size", 8, "--max-steps", 2, "--lr", 1e-3, "--no-mlflow")
MAKE = ("--shards", 2, "--no-mlflow")
NEVER_READ = re.compile(r".*\.(py|bin|gguf)|consolidated\.safetensors|onnx/.*")
PREFS = "datasets/acme/prefs"


@pytest.fixture
def person(server, hub, world, tmp_path):
    """Someone who has nothing but the names acme/tiny and acme/prefs."""
    unread = dict.fromkeys(("modeling.py", "pytorch_model.bin", "model.gguf"), b"x")
    unread |= {"consolidated.safetensors": b"x", "onnx/config.json": b"{}"}
    hub.repo("acme/tiny").commit_folder(world.model, **unread)
    rows = world.data.paired.read_bytes()
    files = {f"data/{split}-00000-of-00001.parquet": rows for split in ("train", "test")}
    hub.repo(PREFS).commit({**files, "prefs.py": b"x", "README.md": b"# Rows"})
    return Person(server, tmp_path, hub.environment(tmp_path / "hf"))


def of_repos(hub):
    """The requests but those for the list of programs by which the client names itself."""
    return [one for one in hub.requests if "/acme/" in one.path]


def commits(hub, name):
    return [*hub.repo(name).commits]


def changed(world, folder):
    """A copy of the model with other weights."""
    shutil.copytree(world.model, folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return folder


def test_a_run_by_names_is_pinned_to_commits_and_reads_neither_code_nor_pickles(person, hub):
    made = ("run", "acme/prefs", "--split", "train", "--model", "acme/tiny", *MAKE, *SHORT)
    answer = person.gives(*made, "--cache", "cache", "--output", "run")
    (model,), (data,) = commits(hub, "acme/tiny"), commits(hub, PREFS)
    model, data = f"hf://acme/tiny@{model}", f"hf://{PREFS}@{data}"
    require_names(answer.err, model, data)
    assert Cache(person.folder / "cache").manifest().model == model
    require_names((person.folder / "run" / "config.yaml").read_text(), model, data)
    card = (person.folder / "run" / "model" / "README.md").read_text()
    require_names(card, 'base_model: "acme/tiny"\n', model)
    fetched = hub.fetched()
    assert {"model.safetensors", "data/train-00000-of-00001.parquet"} <= fetched
    assert not [name for name in fetched if NEVER_READ.fullmatch(name) or "test" in name]


def test_a_cache_is_trained_with_its_own_commit_without_a_request(person, hub, world, tmp_path):
    """Whatever is on the Hub meanwhile, and whether it answers."""
    made = ("precompute-ref", world.data.paired, *MAKE, "--output")
    person.gives(*made, "cache", "--model", "hf://acme/tiny@main")
    hub.repo("acme/tiny").commit_folder(changed(world, tmp_path / "changed"))
    hub.requests.clear()
    train = ("train", "--cache", "cache", *SHORT, "--output")
    person.gives(*train, "run")
    offline = replace(person, environment={**person.environment, "HF_HUB_OFFLINE": "1"})
    offline.gives(*train, "offline")
    assert not of_repos(hub)
    # The same weights in a folder are the same reference, and the new commit is another.
    person.gives(*made, "of-folder", "--model", world.model, "--reuse", "cache")
    keys = [Cache(tmp_path / one).manifest().reference_key for one in ("cache", "of-folder")]
    assert keys[0] == keys[1]
    person.gives("train", "--cache", "of-folder", *SHORT, "--output", "same")
    assert weights(tmp_path / "run") == weights(tmp_path / "same") == weights(tmp_path / "offline")
    refused = person.tries(*made, "cache", "--model", "acme/tiny")
    assert refused.code == 4
    require_names(refused.err, "model.weights", *commits(hub, "acme/tiny"))


@pytest.mark.parametrize("how", ["offline", "unreachable", "down"])
def test_without_the_hub_the_commit_in_its_cache_is_read_and_named(person, hub, how):
    words = ("check", "acme/prefs", "--split", "train", "--model", "acme/tiny")
    person.gives(*words)
    hub.repo("acme/tiny").commit({"config.json": b"{}"})
    hub.requests.clear()
    hub.status = 503 if how == "down" else 0
    changes = {"offline": {"HF_HUB_OFFLINE": "1"}, "unreachable": {"HF_ENDPOINT": UNREACHABLE}}
    away = replace(person, environment={**person.environment, **changes.get(how, {})})
    answer = away.gives(*words)
    require_names(answer.err, "acme/tiny", commits(hub, "acme/tiny")[0])
    assert how == "down" or not of_repos(hub)
    shutil.rmtree(person.folder / "hf")
    refused = away.tries(*words)
    assert refused.code == (2 if how == "offline" else 69)
    require_names(refused.err, "hf://acme/tiny", "HF_HUB_OFFLINE" if how == "offline" else "Hub")


UNREACHABLE = "http://127.0.0.1:9"
SUBSETS = b"""---
license: mit
configs:
- config_name: helpful
  data_files:
  - {split: train, path: "helpful/**/train-*"}
  - {split: test, path: helpful/a/test.parquet}
- config_name: harmless
  data_dir: safe
  data_files: ["*.parquet"]
---
# Rows
"""


@pytest.fixture
def with_subsets(hub, world):
    """A data set with two subsets, of which one has splits."""
    names = ("helpful/a/train-1.parquet", "helpful/train-2.parquet", "helpful/a/test.parquet")
    names += ("safe/rows.parquet", "safe/more/rows.parquet", "other/train-3.parquet")
    rows = [path.read_bytes() for path in sorted((world.folder / "data").glob("paired*.parquet"))]
    files = {name: rows[number % len(rows)] for number, name in enumerate(names)}
    hub.repo("datasets/acme/sets").commit({**files, "README.md": SUBSETS})


@pytest.mark.parametrize(
    ("named", "fetched"),
    [
        ("/helpful --split train", {"helpful/a/train-1.parquet", "helpful/train-2.parquet"}),
        ("/helpful --split test", {"helpful/a/test.parquet"}),
        ("/harmless", {"safe/rows.parquet"}),
        ("/other/train-3.parquet", {"other/train-3.parquet"}),
    ],
)
def test_only_the_files_of_a_subset_and_split_are_fetched(
    person, hub, with_subsets, named, fetched
):
    person.gives("check", *f"hf://datasets/acme/sets@main{named}".split())
    assert hub.fetched() == {*fetched, "README.md"}


def test_a_tokenizer_is_fetched_without_the_weights(person, hub, world):
    person.gives("check", world.data.paired, "--model", "acme/tiny")
    assert "tokenizer.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()


def test_a_model_in_several_files_and_an_adapter_in_a_folder_are_fetched(person, hub, world):
    """Only the files that the index names."""
    from safetensors.torch import load_file, save  # noqa: PLC0415  it imports torch

    from support.families import saved_adapter  # noqa: PLC0415  as above

    tensors = load_file(world.model / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    files = {name: save({one: tensors[one] for one in own}) for name, own in parts.items()}
    places = {one: name for name, own in parts.items() for one in own}
    index = json.dumps({"metadata": {}, "weight_map": places}).encode()
    adapter = person.folder / "adapter"
    saved_adapter(adapter, world.model)
    of_adapter = {f"lora/{path.name}": path.read_bytes() for path in adapter.iterdir()}
    of_tiny = {path.name: path.read_bytes() for path in world.model.iterdir() if path.is_file()}
    del of_tiny["model.safetensors"]
    unread = {"c.safetensors": b"x"}
    own = {**of_tiny, **files, **unread, "model.safetensors.index.json": index}
    hub.repo("acme/parts").commit({**own, **of_adapter})
    made = ("precompute-ref", world.data.paired, *MAKE, "--output", "cache")
    person.gives(*made, "--model", "acme/parts", "--adapter", "hf://acme/parts/lora")
    (commit,) = commits(hub, "acme/parts")
    assert Cache(person.folder / "cache").manifest().adapter == f"hf://acme/parts@{commit}/lora"
    assert {*files, "lora/adapter_model.safetensors"} <= hub.fetched()
    assert "c.safetensors" not in hub.fetched()


REFUSED = {  # the words of a command, its exit code, and what its one message names
    "{data} --model acme/none": (2, "hf://acme/none", "HF_TOKEN", "./"),
    "{data} --model acme/tiny@v9": (2, "hf://acme/tiny@v9", "v9"),
    "{data} --model acme/gated": (2, "hf://acme/gated@", "gated", "HF_TOKEN"),
    "{data} --model acme/private": (2, "hf://acme/private", "HF_TOKEN"),
    "{data} --model acme/pickles": (2, "hf://acme/pickles@", "safetensors"),
    "{data} --model hf://acme": (2, "hf://acme", "hf://OWNER/NAME"),
    "{data} --model hf://spaces/acme/tiny": (2, "hf://spaces/acme/tiny", "space"),
    "{data} --model acme/tiny --output hf://acme/out": (2, "hf://acme/out", "align push"),
    "hf://acme/tiny --model acme/tiny": (2, "hf://acme/tiny", "hf://datasets/OWNER/NAME"),
    "acme/prefs --model acme/tiny": (2, "hf://datasets/acme/prefs@", "train", "test", "--split"),
    "acme/prefs --split dev --model acme/tiny": (2, "--split dev", "test, train"),
    "acme/sets --model acme/tiny": (2, "helpful, harmless", "hf://datasets/acme/sets@"),
    "hf://datasets/acme/sets/nice --model acme/tiny": (2, "helpful, harmless", "nice"),
    "acme/images --model acme/tiny": (2, "hf://datasets/acme/images@", ".parquet"),
}


@pytest.mark.usefixtures("with_subsets")
def test_each_refusal_is_one_message_and_never_shows_a_token(person, hub, world):
    hub.repo("acme/gated", gated=True).commit_folder(world.model)
    hub.repo("acme/private", private=True).commit_folder(world.model)
    hub.repo("acme/pickles").commit({"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.repo("datasets/acme/images").commit({"README.md": b"#", "a.png": b"x", "load.py": b"x"})
    for words, (code, *names) in REFUSED.items():
        answer = person.tries(
            "precompute-ref", *words.format(data=world.data.paired).split(), *MAKE
        )
        assert (answer.code, answer.err.count("error: ")) == (code, 1), answer
        require_names(answer.err.partition("error: ")[2], *names)
        assert "Traceback" not in answer.err
    assert not {one for one in hub.fetched() if NEVER_READ.fullmatch(one)}
    with_token = replace(person, environment={**person.environment, "HF_TOKEN": TOKEN})
    with_token.gives("check", world.data.paired, "--model", "acme/private")
    wrong = replace(person, environment={**person.environment, "HF_TOKEN": f"{TOKEN}0"})
    answer = wrong.tries("check", world.data.paired, "--model", "acme/private")
    assert answer.code == 2
    require_names(answer.err, "hf://acme/private", "token")
    assert TOKEN not in answer.out + answer.err


def test_a_folder_of_the_name_wins_next_to_its_config_file(person, hub, world):
    """And a revision is never a part of a folder's name."""
    project = person.folder / "project"
    shutil.copytree(world.model, project / "acme" / "tiny")
    lines = ("model: {path: acme/tiny}", "data: {files: acme/prefs, split: train}")
    (project / "align.yaml").write_text("\n".join(lines).replace("acme/prefs", "[acme/prefs]"))
    person.gives("check", "--config", "project/align.yaml")
    assert not [one for one in of_repos(hub) if "acme/tiny" in one.path]
    assert "data/train-00000-of-00001.parquet" in hub.fetched()


def test_a_plain_name_is_of_the_hub_unless_it_is_a_path(here):
    (here / "acme" / "here").mkdir(parents=True)
    addresses = {
        "acme/tiny": "hf://acme/tiny",
        "acme/tiny-0.5B@v1.0": "hf://acme/tiny-0.5B@v1.0",
        "acme/tiny@refs/pr/1": "hf://acme/tiny@refs/pr/1",
    }
    paths = ("acme/here", "./acme/tiny", "acme", "acme/tiny/", "/acme/tiny", "a/b/c", "../tiny")
    for given, expected in {**addresses, **{path: path for path in paths}}.items():
        assert load_settings({"model.path": given}, [], file=None).config.model.path == expected
    files = ["acme/prefs", "data/rows.jsonl", "s3://acme/prefs"]
    found = load_settings({}, [], file=None, data=files).config.data.files
    assert found == ["hf://datasets/acme/prefs", *files[1:]]
    address = f"hf://datasets/acme/prefs@{'0' * 40}/helpful"
    mask_secrets_of(address)
    assert redacted(f"read {address}.") == f"read {address}."
    cached = f"/hub/datasets--acme--prefs/snapshots/{'0' * 40}"
    assert [data_name([one]) for one in (address, cached)] == ["helpful", "prefs"]
    names = ("hf://acme/tiny", f"hf://acme/tiny@{'0' * 40}", cached.replace("prefs", "tiny"))
    assert {model_name(one) for one in names} == {"tiny"}


def test_subsets_of_a_folder_on_the_disk_are_read_as_on_the_hub(tmp_path):
    """And no pattern leads out of the folder."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    folder = tmp_path / "set"
    for name in ("helpful/train-1.jsonl", "helpful/a/b/train-2.jsonl", "safe/rows.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "rows.jsonl", folder / name)
    (folder / "README.md").write_bytes(SUBSETS.replace(b"*.parquet", b"**"))
    found = [file.path.name for file in open_inputs([str(folder / "helpful")], "train")]
    assert found == ["train-2.jsonl", "train-1.jsonl"]
    (file,) = open_inputs([str(folder / "harmless")])
    assert file.path == folder / "safe" / "rows.jsonl"
    with refuses(UsageError, "helpful, harmless"):
        open_inputs([str(folder)])
    (folder / "README.md").write_bytes(SUBSETS.replace(b"*.parquet", b"../../rows.jsonl"))
    with refuses(UsageError, "harmless"):
        open_inputs([str(folder / "harmless")])


def test_ranks_with_different_commits_are_refused(person, hub, world, tmp_path):
    """As where a branch moves while a run starts."""
    made = ("precompute-ref", world.data.paired, *MAKE, "--output", "cache")
    person.gives(*made, "--model", "acme/tiny")
    homes = [tmp_path / "hf", tmp_path / "hf-1"]
    hub.repo("acme/tiny").commit_folder(changed(world, tmp_path / "changed"))
    later = replace(person, environment=hub.environment(homes[1]))
    later.gives(*made[:-1], "another", "--model", "acme/tiny")

    def launcher(rank, port):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ALIGN_HOME": tmp_path / "home"}
        return {**world, **hub.environment(homes[rank], HF_HUB_OFFLINE="1")}

    run = ("train", "--cache", "cache", "--model", "acme/tiny", *SHORT, "--output", "run")
    more = ("--set", "train.other_reference=true")
    training = person.server.start(*run, *more, cwd=tmp_path, ranks=2, launcher=launcher)
    answers = training.answers()
    assert [answer.code for answer in answers] == [4, 4], answers
    require_names(answers[0].err, *commits(hub, "acme/tiny"))


def test_a_pushed_adapter_is_measured_on_the_commit_of_its_base(person, hub, world):
    """By its plain name; the results name both commits and no folder of this machine."""
    from support.families import saved_adapter  # noqa: PLC0415  it imports torch

    person.gives("precompute-ref", world.data.paired, "--model", "acme/tiny", *MAKE)
    (base,) = commits(hub, "acme/tiny")
    folder = saved_adapter(person.folder / "adapter", world.model)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "acme/tiny", "revision": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    hub.repo("acme/lora").commit_folder(folder)
    hub.repo("acme/tiny").commit({"config.json": b"{}"})
    measure = ("--cache", "align-cache", "--method", "dpo", "--json")
    results = json.loads(person.gives("evaluate", "acme/lora", *measure).out)
    (adapter,) = commits(hub, "acme/lora")
    assert results["adapter"] == f"hf://acme/lora@{adapter}"
    assert results["model"] == f"hf://acme/tiny@{base}"
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "gone", "revision": None})
    )
    answer = person.tries("evaluate", "adapter", *measure, "--output", "other")
    assert (answer.code, "--model" in answer.err) == (2, False)
    require_names(answer.err, "gone", "adapter_config.json")
    server = ("--server", UNREACHABLE, "--adapter", "acme/none")
    refused = person.tries("verify", "align-cache", *server)
    assert refused.code == 2
    require_names(refused.err, "hf://acme/none")
