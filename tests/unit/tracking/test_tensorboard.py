"""TensorBoard's files hold the metrics, each once, whatever became of who wrote them."""

import pytest

from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.tensorboard_tracker import FOLDER, table
from support.patience import wait_until
from support.tensorboard_runs import TensorboardStore, hparams, logged_numbers, scalars
from support.tracked_training import begin, kill, learn, run_folder, trained_again

ALONE = ["tensorboard"]

pytestmark = pytest.mark.usefixtures("quick_seconds")


@pytest.fixture
def killed(tmp_path):
    """A run that wrote thirty steps, and then no more."""
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    wait_until(lambda: run.run_ids)  # it was told before it had any settings
    run.log_params({"lr": "1e-06", "model": "a|b", "lora": "False"})
    learn(run, range(1, 31))
    kill(run)
    return folder, run


def the_run(folder):
    """The one run that TensorBoard shows."""
    (shown,) = (folder.root / FOLDER).iterdir()
    return shown


def test_a_resumed_run_is_one_with_each_number_at_its_step_and_time(killed, tmp_path):
    """Its last event was torn off, and its folder is elsewhere by then."""
    folder, first = killed
    shown = the_run(folder)
    assert scalars(shown) == logged_numbers(folder.root)
    assert len(scalars(shown)) == 30 * 2 + 3
    (events,) = shown.iterdir()
    events.write_bytes(events.read_bytes() + events.read_bytes()[-100:-7])
    folder.root.rename(tmp_path / "moved")
    folder = RunFolder(tmp_path / "moved")
    shown = the_run(folder)
    second = begin(folder, "", trackers=ALONE, keep_through=30)
    learn(second, range(31, 41))
    second.finish("FINISHED")
    assert second.run_ids == first.run_ids == {"tensorboard": the_run(folder).name}
    assert scalars(shown) == logged_numbers(folder.root)
    assert TensorboardStore(folder.root).stored(shown.name).status == "FINISHED"
    assert hparams(shown) == {"lr": 1e-6, "model": "a|b", "lora": False}
    assert not (folder.root / "mlflow.db").exists()


@pytest.mark.parametrize("first", [1, 21])
def test_steps_that_are_trained_again_are_shown_once_as_they_are_in_the_metrics(killed, first):
    folder, before = killed
    steps = range(first, 26)
    second = trained_again(folder, "", steps, trackers=ALONE, status="KILLED")
    assert second.run_ids == before.run_ids
    assert scalars(the_run(folder)) == logged_numbers(folder.root)
    assert ("loss", 25, 125.0) in [one[:3] for one in scalars(the_run(folder))]


def test_a_table_shows_every_value_as_it_is():
    """What Markdown would take for its own is written so that it is shown."""
    text = table({"a": "x|y *z* <b>\n`&`"})
    assert text.splitlines()[2] == "| a | x&#124;y &#42;z&#42; &#60;b&#62;&#10;&#96;&amp;&#96; |"
