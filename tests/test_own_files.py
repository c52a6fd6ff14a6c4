"""No command replaces or removes a file that it did not write."""

import json
import shutil

import pytest

from align.schemas.errors import UsageError
from align.stages.demo.tiny_world import make_world
from align.stages.storage.cache_folder import CacheFolder, OutputFolder
from align.stages.storage.run_folder import RunFolder
from support.command import align, refusal


def test_score_replaces_what_it_wrote_and_nothing_of_a_persons_own(world, tmp_path):
    """`rows.jsonl` is a person's file, under the name that `align score` gives its own."""
    own, out = shutil.copy(world.data.paired_jsonl, tmp_path / "rows.jsonl"), tmp_path / "out"
    before = own.read_bytes()
    said = refusal(2, "score", own, "--from-labels", "--output", tmp_path)
    assert "and is not a rewards folder" in said
    assert own.read_bytes() == before
    assert [*tmp_path.iterdir()] == [own]

    command = ("score", own, "--from-labels", "--output", out)
    assert align(*command).code == 0
    first = (out / "rows.jsonl").read_bytes()
    own.write_bytes(b"".join(before.splitlines(keepends=True)[:9]))
    assert align(*command).code == 0
    second = (out / "rows.jsonl").read_bytes()
    assert len(second.splitlines()) == 9 < len(first.splitlines())
    (out / "rows.jsonl").write_bytes(first)  # as a kill before the last rename leaves it
    assert align(*command).code == 0
    edited = second + json.dumps({"prompt": "mine"}).encode()
    (out / "rows.jsonl").write_bytes(edited)
    assert "rows.jsonl" in refusal(2, *command)
    assert (out / "rows.jsonl").read_bytes() == edited


def test_a_new_world_leaves_what_is_beside_it(tmp_path):
    (tmp_path / "w.partial").mkdir()
    assert f"{tmp_path} is not empty" in refusal(2, "tiny-world", tmp_path)
    (tmp_path / "w.partial" / "thesis.tex").touch()
    make_world(tmp_path / "w", rows=5, pretrain_steps=0)
    assert (tmp_path / "w.partial" / "thesis.tex").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"w", "w.partial"}


def test_a_folder_of_one_command_is_not_taken_by_another(tmp_path):
    for kind in ("rewards", "sweep"):
        root = tmp_path / kind
        OutputFolder(root, kind).prepare()
        OutputFolder(root, kind).prepare()
        for other in (CacheFolder(root), RunFolder(root)):
            with pytest.raises(UsageError, match="is not a (cache|training run) folder"):
                other.prepare()
    CacheFolder(tmp_path / "cache").prepare()
    with pytest.raises(UsageError, match="holds .* and is not a sweep folder"):
        OutputFolder(tmp_path / "cache", "sweep").prepare()


def test_a_sweep_leaves_a_persons_own_pages_alone(journey, tmp_path):
    (tmp_path / "sweep.json").write_text("mine")
    command = ("sweep", "--method", "dpo", "--cache", journey.cache, "--output", tmp_path)
    assert "and is not a sweep folder" in refusal(2, *command)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert (tmp_path / "sweep.json").read_text() == "mine"
