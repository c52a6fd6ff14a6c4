"""Whole commands, killed at any operation on the disk: nothing is lost, or paid for twice."""

import random

import pytest

from support import disk_faults
from support.kills import Exporting, Judging, Precomputing, Sampling
from support.sample_tables import sample_table
from support.sampling import write_prompts
from support.stage_one import run
from support.trainings import KILLED

TEXTS = [f"question {number}" + " more" * (number % 3) for number in range(12)]
ANSWERS = {f"Number {index}?": [str(index + step) for step in range(3)] for index in range(5)}


@pytest.fixture
def source(kind, config, tmp_path):
    """What is scored, exported, sampled for or judged."""
    if kind is Sampling:
        return write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    if kind is Judging:
        return sample_table(tmp_path / "samples", ANSWERS)
    if kind is Exporting:
        run(config)
        return config.cache.output
    return config


@pytest.mark.parametrize(
    "is_all", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "all"]
)
@pytest.mark.parametrize(
    ("kind", "least"), [(Precomputing, 30), (Sampling, 20), (Judging, 15), (Exporting, 3)]
)
def test_a_killed_command_pays_only_for_what_is_not_kept(source, tmp_path, kind, least, is_all):
    """Each is killed at one of its operations, and once more on its way from there."""
    whole, operations, draw = kind(tmp_path / "whole", source), [], random.Random(0)
    with disk_faults.watch(operations.append):
        whole.run()
    total, count = len(whole.paid()), len(operations)
    assert whole.kept() == total
    assert count >= least
    for place in range(1, count + 1) if is_all else draw.sample(range(1, count + 1), 3):
        command, kept, codes = kind(tmp_path / str(place), source), 0, []
        for number in (place, draw.randint(1, count)):
            codes.append(command.code(number))
            before, kept = kept, command.kept()
            assert before <= kept
            assert len({*command.paid()}) - kept <= command.in_flight
        assert codes[0] == KILLED
        assert codes[1] in (0, KILLED)
        before = len(command.paid())
        command.run()
        paid = command.paid()[before:]
        assert len({*paid}) == len(paid) == total - kept, place
        assert command.outcome() == whole.outcome()
        # A draft without content stays: its writer may live, and not have locked it yet.
        assert not [path for path in command.root.rglob(".*.tmp") if path.stat().st_size]
