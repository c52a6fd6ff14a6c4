"""A part that is held up while its cache is completed, and grows, takes nothing back."""

from dataclasses import replace

import pytest

from align.pipeline.executor import Share
from align.pipeline.precompute import precompute_part
from align.schemas.config import DataOptions
from align.schemas.errors import FingerprintError, LockedError
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from align.stages.storage.objects import location
from support.stage_one import Silent, run
from support.stub_reference import StubReference


class Late(StubReference):
    """A reference that takes long to open: meanwhile, others do something."""

    def __init__(self, meanwhile):
        super().__init__()
        self._meanwhile = meanwhile

    def open(self):
        self._meanwhile()
        return super().open()


@pytest.fixture(params=["disk", "store"])
def cache_place(request, tmp_path):
    """Where the cache is."""
    if request.param == "disk":
        return str(tmp_path / "cache")
    return f"{request.getfixturevalue('bucket')}/cache"


def test_a_late_part_does_not_publish_what_the_cache_has_outgrown(to, data, tmp_path, cache_place):
    lines = data.paired_jsonl.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:10]))
    (tmp_path / "more.jsonl").write_text("".join(lines[10:20]))
    files = [str(tmp_path / "few.jsonl"), str(tmp_path / "more.jsonl")]
    many = replace(to(output=cache_place), data=DataOptions(files=files))
    few = replace(many, data=DataOptions(files=files[:1]))
    grown = []

    def meanwhile():
        run(few)
        grown.append(run(many).manifest)
        with pytest.raises(FingerprintError):
            run(few)  # it would lose rows; its folder of work is there again

    with pytest.raises(LockedError):
        run(few, Late(meanwhile), share=Share(1, 1))
    folder = CacheFolder(location(cache_place))
    assert load_manifest(folder) == grown[0]
    assert run(many).was_complete


class Interfered(Silent):
    """A progress during which others do something, before rows are sorted."""

    def __init__(self, meanwhile):
        self._meanwhile = meanwhile

    def begin(self, task, *, total, unit):
        if task == "sorting":
            self._meanwhile()


def test_a_part_whose_preparing_was_ended_by_a_cache_of_other_data_says_so(to, data, tmp_path):
    lines = data.paired_jsonl.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:10]))
    (tmp_path / "others.jsonl").write_text("".join(lines[10:]))
    few, others = (
        replace(to(output=str(tmp_path / "cache")), data=DataOptions(files=[str(path)]))
        for path in (tmp_path / "few.jsonl", tmp_path / "others.jsonl")
    )
    progress = Interfered(lambda: run(few))
    with pytest.raises(LockedError, match="another run, on other data"):
        precompute_part(others, StubReference(), Share(1, 2), progress=progress)
