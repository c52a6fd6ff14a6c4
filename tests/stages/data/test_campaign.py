"""Data files damaged by chance, each in a process that may die of it: tests/campaigns."""

import subprocess
import sys

import pytest

from support.rooms import ROOT

CAMPAIGN = ROOT / "tests" / "campaigns" / "data_files.py"


def campaign(*arguments):
    command = [sys.executable, CAMPAIGN, "--processes", "1", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("seeds", ["0:49", pytest.param("100000:102000", marks=pytest.mark.long)])
def test_no_damaged_file_is_read_wrongly_or_ends_the_process(tmp_path, seeds):
    done = campaign("--seeds", seeds, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout + (tmp_path / "cases.jsonl").read_text()


@pytest.mark.long
def test_a_planted_fault_is_found(tmp_path):
    done = campaign("--seeds", "0:600", "--keep", tmp_path, "--planted")
    assert done.returncode == 1
    assert '"outcome": "wrong"' in (tmp_path / "cases.jsonl").read_text()
