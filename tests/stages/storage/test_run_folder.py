import pytest

from align.schemas.checkpoint import CheckpointFile, Ending, RunIdentity
from align.schemas.errors import CorruptionError, LockedError, UsageError
from align.schemas.json_codec import to_signed_json
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.locks import owner_lock
from align.stages.storage.run_folder import RunFolder, read_ending, trash_name
from support.checkpoint_saves import save


def test_a_run_has_its_folders(prepared_run):
    assert sorted(path.name for path in prepared_run.root.iterdir()) == ["_align", "checkpoints"]
    prepared_run.prepare()
    prepared_run.require_new()


def test_an_ending_that_vouches_for_a_file_elsewhere_is_refused(prepared_run):
    name = "../elsewhere"
    (prepared_run.root / name).write_text("x")
    files = (CheckpointFile(name, 1, "0" * 64),)
    ending = Ending("finished", 1, 1, RunIdentity("", 1, 0, {}, {}), (), files)
    prepared_run.ending.write_text(to_signed_json(ending))
    with pytest.raises(
        CorruptionError, match=r"ending.json is damaged: it names the file '\.\./else"
    ):
        read_ending(prepared_run)


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex' and is not a training run folder"):
        RunFolder(tmp_path).prepare()
    with pytest.raises(UsageError, match="not a folder"):
        RunFolder(tmp_path / "thesis.tex").prepare()


def test_a_cache_is_not_taken_for_a_run_nor_a_run_for_a_cache(tmp_path, prepared_run):
    CacheFolder(tmp_path / "cache").prepare()
    with pytest.raises(UsageError, match="is not a training run folder"):
        RunFolder(tmp_path / "cache").prepare()
    with pytest.raises(UsageError, match="is not a cache folder"):
        CacheFolder(prepared_run.root).prepare()


def test_two_runs_never_share_a_folder(prepared_run):
    said = r"run first.*Wait for it, or choose"
    with owner_lock(prepared_run, "first"), pytest.raises(LockedError, match=said) as refused:
        owner_lock(prepared_run, "second")
    assert refused.value.exit_code == 75


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (lambda folder: save(folder, 7), "unfinished run, with a checkpoint of step 7"),
        (lambda folder: folder.metrics.touch(), "unfinished run without a checkpoint"),
        (lambda folder: folder.model.mkdir(), "finished run"),
    ],
)
def test_a_run_that_was_begun_is_not_begun_anew(prepared_run, begin, said):
    begin(prepared_run)
    with pytest.raises(UsageError, match=rf"{said}.*--resume auto.*--output.*remove"):
        prepared_run.require_new()


def test_what_killed_runs_left_is_swept_up(prepared_run):
    save(prepared_run, 1)
    draft = prepared_run.draft(2, "dead-run")
    draft.mkdir()
    (draft / "state-0.pt").write_bytes(b"half")
    trash_name(prepared_run.step(9)).mkdir()
    (prepared_run.checkpoints / ".bad-step-00000003-0badcafe").mkdir()
    (prepared_run.checkpoints / ".latest.0123456789abcdef.tmp").touch()
    (prepared_run.root / ".metrics.jsonl.0123456789abcdef.tmp").touch()
    prepared_run.sweep()
    left = [path.name for path in prepared_run.checkpoints.iterdir()]
    assert sorted(left) == [".bad-step-00000003-0badcafe", "latest", "step-00000001"]
    assert sorted(path.name for path in prepared_run.root.iterdir()) == ["_align", "checkpoints"]
