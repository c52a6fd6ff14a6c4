import pytest

from align.schemas.errors import UsageError
from align.stages.storage.cache_folder import CacheFolder


def test_a_new_folder_is_made_with_its_parents(tmp_path):
    folder = CacheFolder(tmp_path / "a" / "b")
    folder.prepare()
    folder.prepare()
    assert folder.data.is_dir()
    work = folder.work("f" * 64)
    work.prepare()
    assert work.commits.is_dir()
    assert work.new_draft("run", "a").parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex'.*Choose another --output"):
        CacheFolder(tmp_path).prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match="not a folder"):
        CacheFolder(tmp_path / "out").prepare()


def test_a_finished_cache_may_be_opened_again(cache):
    cache.prepare()


def test_a_folder_that_was_only_begun_may_be_used_again(tmp_path):
    (tmp_path / "out" / "_align").mkdir(parents=True)
    CacheFolder(tmp_path / "out").prepare()
