import pytest
from checkpoint_saves import save

from align.schemas.errors import LockedError, UsageError
from align.stages.storage.layout import CacheFolder
from align.stages.storage.locks import owner_lock
from align.stages.storage.run_folder import RunFolder, trash_name


@pytest.fixture(name="folder")
def _folder(tmp_path):
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.prepare()
    return folder


def test_a_run_has_its_folders(folder):
    assert sorted(path.name for path in folder.root.iterdir()) == ["_align", "checkpoints"]
    folder.prepare()
    folder.require_new()


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex' and no training run"):
        RunFolder(tmp_path).prepare()
    with pytest.raises(UsageError, match="not a folder"):
        RunFolder(tmp_path / "thesis.tex").prepare()


def test_a_cache_is_no_run_and_a_run_no_cache(tmp_path, folder):
    CacheFolder(tmp_path / "cache").prepare()
    with pytest.raises(UsageError, match="no training run"):
        RunFolder(tmp_path / "cache").prepare()
    with pytest.raises(UsageError, match="no cache"):
        CacheFolder(folder.root).prepare()


def test_two_runs_never_share_a_folder(folder):
    with owner_lock(folder, "first"):
        with pytest.raises(LockedError, match=r"run first.*Wait for it, or choose") as refused:
            owner_lock(folder, "second")
        assert "--join" not in str(refused.value)
    assert refused.value.exit_code == 75


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (lambda folder: save(folder, 7), "unfinished run, with a checkpoint of step 7"),
        (lambda folder: folder.metrics.touch(), "unfinished run without a checkpoint"),
        (lambda folder: folder.model.mkdir(), "finished run"),
    ],
)
def test_a_run_that_was_begun_is_not_begun_anew(folder, begin, said):
    begin(folder)
    with pytest.raises(UsageError, match=rf"{said}.*--resume auto.*--output.*remove"):
        folder.require_new()


def test_what_killed_runs_left_is_swept_up(folder):
    save(folder, 1)
    draft = folder.draft(2, "dead-run")
    draft.mkdir()
    (draft / "state-0.pt").write_bytes(b"half")
    trash_name(folder.step(9)).mkdir()
    (folder.checkpoints / ".bad-step-00000003-0badcafe").mkdir()
    (folder.checkpoints / ".latest.0123456789abcdef.tmp").touch()
    (folder.root / ".metrics.jsonl.0123456789abcdef.tmp").touch()
    folder.sweep()
    left = [path.name for path in folder.checkpoints.iterdir()]
    assert sorted(left) == [".bad-step-00000003-0badcafe", "latest", "step-00000001"]
    assert sorted(path.name for path in folder.root.iterdir()) == ["_align", "checkpoints"]
