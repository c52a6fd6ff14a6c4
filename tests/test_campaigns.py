"""What comes in from strangers, damaged by chance: the first cases of each campaign, and its fault.

A campaign is a program of its own: `python tests/campaigns/NAME.py --seeds 0:100000 --keep FOLDER`.
"""

import subprocess
import sys

import pytest

from support.rooms import ROOT

# The cases of each that are always tried, and many more.
SEEDS = {
    "chat_templates": ("0:12", "1000:3000"),
    "commands": ("0:1", "1000:1500"),
    "data_files": ("0:49", "100000:102000"),
    "folders": ("0:8", "100000:101000"),
    "model_folders": ("3:7", "100:700"),
    "server_answers": ("0:12", "1000:3000"),
    "settings": ("0:64", "10000:30000"),
}
# A check that is left out, and cases in which that shows.
PLANTED = {
    "chat_templates": ("row", "0:4"),
    "commands": ("cleaning", "0:16"),
    "data_files": ("text", "606:610"),
    "folders": ("values", "122:123"),
    "model_folders": ("experts", "1403:1404"),
    "server_answers": ("range", "41:42"),
    "settings": ("bounds", "0:200"),
}
LONG = pytest.mark.long
SLOW = ("commands", "folders", "model_folders", "settings")


def campaign(name, *arguments):
    command = [sys.executable, ROOT / "tests" / "campaigns" / f"{name}.py", "--processes", "1"]
    return subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, few) for name, (few, _) in SEEDS.items()),
        *(pytest.param(name, many, marks=LONG) for name, (_, many) in SEEDS.items()),
    ],
)
def test_no_case_ends_in_an_error_of_ours_or_is_wrong_in_silence(tmp_path, name, seeds):
    first = campaign(name, "--seeds", seeds, "--keep", tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = (tmp_path / "cases.jsonl").read_text()
    again = campaign(name, "--seeds", seeds, "--keep", tmp_path)
    assert again.stdout == first.stdout
    assert (tmp_path / "cases.jsonl").read_text() == lines  # nothing was left to do


# These have tests of their own, and making what they damage takes long.
@pytest.mark.parametrize(
    "name",
    [
        *("chat_templates", "data_files", "server_answers"),
        *(pytest.param(name, marks=LONG) for name in SLOW),
    ],
)
def test_a_check_that_is_left_out_is_found(name):
    plant, seeds = PLANTED[name]
    assert campaign(name, "--seeds", seeds, "--plant", plant).returncode == 1
