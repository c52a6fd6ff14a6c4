import json
import os

import pytest

from align.schemas.checkpoint import FORMAT_VERSION, Retention
from align.schemas.errors import CorruptionError, FingerprintError
from align.schemas.json_codec import digest
from align.stages.storage import objects
from align.stages.storage.checkpoints import choose_checkpoint, verify_checkpoint
from align.stages.storage.run_folder import RECORD_NAME, RunFolder
from align.stages.storage.run_store import RunStore
from support.checkpoint_saves import save


@pytest.fixture(name="saved_run")
def _saved_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    for step in (1, 2, 3):
        save(folder, step, retention=Retention(keep_last=3))
    return folder


def step_chosen(folder):
    chosen = choose_checkpoint(folder)
    return chosen.checkpoint.position.global_step if chosen else None


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert choose_checkpoint(RunFolder(tmp_path / "nowhere")) is None


def test_latest_counts_before_what_is_newer(saved_run):
    saved_run.latest.write_text("step-00000002\n")
    assert step_chosen(saved_run) == 2
    assert saved_run.steps() == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "step-00000009\n", "../../etc", "step-3", "\xff", None])
def test_a_latest_that_names_nothing_is_replaced_by_the_newest(saved_run, text, caplog):
    saved_run.latest.unlink()
    if text is not None:
        saved_run.latest.write_bytes(text.encode("latin-1"))
    assert step_chosen(saved_run) == 3
    assert "does not name a checkpoint" in caplog.text


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(change):
    def damage(step):
        plain = json.loads((step / RECORD_NAME).read_bytes())
        change(plain)
        del plain["digest"]
        plain["digest"] = digest(plain)
        text = json.dumps(plain, sort_keys=True, separators=(",", ":")) + "\n"
        (step / RECORD_NAME).write_text(text)

    return damage


def renamed_in_record(name):
    return edit(lambda plain: plain["files"][0].update(path=name))


def linked(step):
    (step / "state-0.pt").rename(step.parent / "elsewhere")
    (step / "state-0.pt").symlink_to(step.parent / "elsewhere")


def folder_linked(step):
    (step / "weights").rename(step.parent / "elsewhere")
    (step / "weights").symlink_to(step.parent / "elsewhere")


DAMAGE = {
    "a flipped bit": lambda step: flip(step / "state-0.pt"),
    "a flipped bit below": lambda step: flip(step / "weights" / "0-b.bin"),
    "a flipped bit in the record": lambda step: flip(step / RECORD_NAME),
    "a cut file": lambda step: os.truncate(step / "state-0.pt", 5),
    "a missing file": lambda step: (step / "state-0.pt").unlink(),
    "a missing record": lambda step: (step / RECORD_NAME).unlink(),
    "a torn record": lambda step: os.truncate(step / RECORD_NAME, 40),
    "an empty record": lambda step: os.truncate(step / RECORD_NAME, 0),
    "a file too many": lambda step: (step / "zero_pp_rank_1_optim_states.pt").touch(),
    "a link for a file": linked,
    "a link for a folder": folder_linked,
    "a pipe": lambda step: os.mkfifo(step / "pipe"),
    "another step's record": edit(lambda plain: plain["position"].update(global_step=4)),
    "an unknown field": edit(lambda plain: plain.update(extra=1)),
    "a path upwards": renamed_in_record("../state-0.pt"),
    "an absolute path": renamed_in_record("/etc/passwd"),
    "a path twice": renamed_in_record("weights/0-a.bin"),
    "a path through a dot": renamed_in_record("./state-0.pt"),
    "a path of another system": renamed_in_record("..\\state-0.pt"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_chosen(saved_run, what, caplog):
    DAMAGE[what](saved_run.step(3))
    chosen = choose_checkpoint(saved_run)
    assert chosen.checkpoint.position.global_step == 2
    assert saved_run.steps() == [1, 2]
    (aside,) = saved_run.checkpoints.glob(".bad-step-00000003-*")
    assert chosen.set_aside == (aside.name,)
    assert f"now called {aside.name}" in caplog.text
    assert step_chosen(saved_run) == 2  # and again, though `latest` still names step 3


def test_where_all_are_damaged_there_is_none(saved_run):
    for step in saved_run.steps():
        flip(saved_run.step(step) / "state-0.pt")
    assert choose_checkpoint(saved_run) is None
    assert len(list(saved_run.checkpoints.glob(".bad-*"))) == 3


@pytest.mark.parametrize(("by", "which"), [(1, "a newer"), (-1, "the older")])
def test_a_checkpoint_of_another_format_is_refused_and_left_in_peace(saved_run, by, which):
    edit(lambda plain: plain.update(format_version=FORMAT_VERSION + by))(saved_run.step(3))
    with pytest.raises(FingerprintError, match=f"Install {which} align"):
        choose_checkpoint(saved_run)
    assert saved_run.steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("an older format", FingerprintError, "Install the older align"),
        ("another step's record", CorruptionError, "it is of step 4"),
        ("a path upwards", CorruptionError, "impossible paths"),
        ("a flipped bit in the record", CorruptionError, "is damaged"),
        ("a torn record", CorruptionError, "is damaged"),
    ],
)
def test_a_record_in_a_store_is_held_to_what_holds_on_a_disk(saved_run, bucket, what, error, said):
    older = edit(lambda plain: plain.update(format_version=FORMAT_VERSION - 1))
    path = bucket / "checkpoints" / "step-00000003.json"
    (DAMAGE | {"an older format": older})[what](saved_run.step(3))
    objects.put(path, (saved_run.step(3) / RECORD_NAME).read_bytes())
    with pytest.raises(error, match=f"{path} .*{said}"):
        RunStore(bucket, saved_run).pull()


def test_every_flipped_bit_of_a_checkpoint_is_found(saved_run):
    step = saved_run.step(3)
    for path in [path for path in step.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises((CorruptionError, FingerprintError)):
                verify_checkpoint(step)
        path.write_bytes(whole)
    verify_checkpoint(step)


def test_latest_is_read_for_what_it_is(saved_run):
    assert saved_run.latest_step() == 3
