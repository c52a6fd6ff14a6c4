"""What comes in from strangers, damaged by chance: the first cases of each campaign, and its fault.

A campaign is a program of its own: `python tests/campaigns/NAME.py --seeds 0:100000 --keep FOLDER`.
"""

import json
import subprocess
import sys
from importlib import import_module

import pytest
from campaigns import runner

from support.rooms import ROOT

# The cases of each that are always tried, and many more.
SEEDS = {
    "chat_templates": ("0:12", "1000:3000"),
    "commands": ("1:2", "1000:1500"),
    "data_files": ("0:49", "100000:102000"),
    "folders": ("0:8", "100000:101000"),
    "model_folders": ("3:7", "100:700"),
    "runs": ("1071:1074", "10000:10500"),
    "settings": ("0:64", "10000:30000"),
}
# A check that is left out, and cases in which that shows.
PLANTED = {
    "chat_templates": ("row", "0:4"),
    "commands": ("cleaning", "0:16"),
    "data_files": ("text", "606:610"),
    "folders": ("values", "122:123"),
    "model_folders": ("experts", "1403:1404"),
    "runs": ("digests", "10:11"),
    "settings": ("bounds", "0:200"),
}
LONG = pytest.mark.long
SLOW = ("commands", "folders", "model_folders", "runs", "settings")


def tried(name, *arguments):
    """The exit code of a campaign, whose cases are tried in another process."""
    campaign = import_module(f"campaigns.{name}").CAMPAIGN
    return runner.main(campaign, ["--processes", "1", *map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, few) for name, (few, _) in SEEDS.items()),
        *(pytest.param(name, many, marks=LONG) for name, (_, many) in SEEDS.items()),
    ],
)
def test_no_case_ends_in_an_error_of_ours_or_is_wrong_in_silence(capsys, name, seeds):
    assert tried(name, "--seeds", seeds) == 0, capsys.readouterr().out


def test_a_campaign_that_was_stopped_goes_on_behind_its_last_whole_line(capsys, tmp_path):
    where = ("--seeds", "0:8", "--keep", tmp_path)
    tried("chat_templates", *where)
    table, lines = capsys.readouterr().out, tmp_path / "cases.jsonl"
    whole = lines.read_text().splitlines(keepends=True)
    kept = [*whole[:5], whole[5][:20]]
    lines.write_text("".join(kept))
    tried("chat_templates", *where)
    assert capsys.readouterr().out == table
    found = lines.read_text().splitlines(keepends=True)
    assert found[:5] == whole[:5]
    assert [json.loads(line)["seed"] for line in found] == [*range(8)]


# These have tests of their own, and making what they damage takes long.
@pytest.mark.parametrize(
    "name",
    [
        *("chat_templates", "data_files"),
        *(pytest.param(name, marks=LONG) for name in SLOW),
    ],
)
def test_a_check_that_is_left_out_is_found(name):
    plant, seeds = PLANTED[name]
    assert tried(name, "--seeds", seeds, "--plant", plant) == 1


def test_a_campaign_is_a_program():
    program = ROOT / "tests" / "campaigns" / "chat_templates.py"
    command = [sys.executable, program, "--seeds", "0:2"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
