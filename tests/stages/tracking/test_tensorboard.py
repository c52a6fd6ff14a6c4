"""TensorBoard's files hold the journal's numbers, each once, whatever became of who wrote them."""

import os

import pytest

from align.stages.tracking.tensorboard_tracker import FOLDER, NUMBERS, table
from support.patience import PATIENCE
from support.tensorboard_runs import TensorboardStore, hparams, journalled, scalars
from support.tracked_training import begin, learn, run_folder, sender_of

ALONE = ["tensorboard"]


@pytest.fixture
def killed(tmp_path):
    """A run that wrote thirty steps, and then no more."""
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    run.log_params({"lr": "1e-06", "model": "a|b", "lora": "False"})
    learn(run, range(1, 31))
    sender_of(run)._over.set()
    sender_of(run)._thread.join(PATIENCE)
    return folder, run


def folders(folder):
    """Those of the runs that TensorBoard shows."""
    return sorted((folder.root / FOLDER).iterdir())


def test_a_run_that_goes_on_is_one_with_each_number_at_its_step_and_time(killed):
    folder, first = killed
    (shown,) = folders(folder)
    assert scalars(shown) == journalled(folder.root)
    assert len(scalars(shown)) == 30 * 2 + 3
    # As a kill in the middle of a line leaves it, after lines that nobody heard had arrived.
    numbers = shown / NUMBERS
    numbers.write_bytes(numbers.read_bytes() + numbers.read_bytes()[-100:-7])
    second = begin(folder, "", trackers=ALONE, keep_through=30)
    learn(second, range(31, 41))
    second.finish("FINISHED")
    assert second.run_ids == first.run_ids == {"tensorboard": shown.name}
    assert scalars(shown) == journalled(folder.root)
    assert TensorboardStore(folder.root).told(shown.name).status == "FINISHED"
    assert hparams(shown) == {"lr": 1e-6, "model": "a|b", "lora": False}
    assert not (folder.root / "mlflow.db").exists()
    assert not folder.mlflow.exists()


def test_steps_that_are_trained_again_are_shown_once(killed):
    folder, first = killed
    second = begin(folder, "", trackers=ALONE, keep_through=20)
    for step in range(21, 26):
        second.log_metrics({"loss": 100.0 + step}, step=step)
    second.finish("KILLED")
    (shown,) = folders(folder)
    assert shown.name not in first.run_ids.values()
    assert scalars(shown) == journalled(folder.root)
    losses = [value for name, step, value, _ in scalars(shown) if (name, step) > ("loss", 20)]
    assert losses[:5] == [121.0, 122.0, 123.0, 124.0, 125.0]


@pytest.mark.parametrize("damage", ["cut", "gone", "no note", "a note of garbage"])
def test_files_that_lost_something_are_made_again(killed, damage):
    folder, _ = killed
    (shown,) = folders(folder)
    if damage == "cut":
        os.truncate(shown / NUMBERS, 100)
    elif damage == "gone":
        (shown / NUMBERS).unlink()
    elif damage == "no note":
        (shown / "sent.json").unlink()
    else:
        (shown / "sent.json").write_text("{")
    begin(folder, "", trackers=ALONE, keep_through=30).finish("FINISHED")
    assert folders(folder) == [shown]
    assert scalars(shown) == journalled(folder.root)


def test_a_run_that_is_moved_goes_on_where_it_is(killed, tmp_path):
    folder, first = killed
    folder.root.rename(tmp_path / "moved")
    moved = type(folder)(tmp_path / "moved")
    second = begin(moved, "", trackers=ALONE, keep_through=30)
    second.finish("FINISHED")
    assert second.run_ids == first.run_ids
    assert scalars(folders(moved)[0]) == journalled(moved.root)


def test_a_link_leads_no_number_out_of_the_run(killed, tmp_path, caplog):
    folder, _ = killed
    (folder.root / FOLDER).rename(tmp_path / "elsewhere")
    (folder.root / FOLDER).symlink_to(tmp_path / "elsewhere")
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*"))
    begin(folder, "", trackers=ALONE, keep_through=30).finish("FINISHED")
    after = sorted(path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*"))
    assert before == after
    assert FOLDER in caplog.text


def test_a_table_shows_every_value_as_it_is():
    """What Markdown would take for its own is written so that it is shown."""
    text = table({"a": "x|y *z* <b>\n`&`"})
    assert text.splitlines()[2] == "| a | x&#124;y &#42;z&#42; &#60;b&#62;&#10;&#96;&amp;&#96; |"
