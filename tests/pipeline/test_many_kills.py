"""Whole commands, killed at any operation on the disk: nothing is lost, or paid for twice."""

import itertools
import random
from dataclasses import replace

import pytest

from support.kills import (
    Exporting,
    Judging,
    Precomputing,
    Rounds,
    Sampling,
    Training,
    kills_on_the_way,
    operations_of,
)
from support.rounds_play import write_settings
from support.sample_tables import sample_table
from support.sampling import write_prompts
from support.stage_one import run

TEXTS = [f"question {number}" + " more" * (number % 3) for number in range(12)]
ANSWERS = {f"Number {index}?": [str(index + step) for step in range(3)] for index in range(5)}
# How many processes each test kills at least.
LEAST = {
    "precompute-ref": 60,
    "sample": 40,
    "judge": 30,
    "export": 3,
    "train": 10,
    "rounds": 5,
}
# Places of a command that are tried where not all of them are.
FEW = {"precompute-ref": 4, "sample": 2, "judge": 2, "export": 2}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What is sampled for, and what is judged."""
    folder = tmp_path_factory.mktemp("sources")
    prompts = write_prompts(folder / "prompts.jsonl", TEXTS)
    return {Sampling: prompts, Judging: sample_table(folder / "samples", ANSWERS)}


@pytest.fixture
def told(request, capsys):
    """Says how many were killed, and requires them to be at least LEAST."""

    def tell(part, kills, *, is_all):
        with capsys.disabled():
            print(f"\n{part}: {kills} kills", end=" ")
        assert kills >= (LEAST if is_all else FEW)[part]

    return tell


def killed_everywhere(part, made, whole, total, *, is_all):
    """Kills commands that `made` makes, each at one of their places and once more on its way."""
    draw, outcome, kills = random.Random(0), whole.outcome(), 0
    places = range(1, total + 1)
    for place in places if is_all else sorted(draw.sample(places, FEW[part])):
        command = made(str(place))
        kills += kills_on_the_way(command, [place, draw.randint(1, total)])
        assert command.outcome() == outcome, place
    return kills


EXTENT = pytest.mark.parametrize(
    "is_all", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "all"]
)


@EXTENT
def test_stage_one_scores_no_committed_unit_again(config, tmp_path, told, is_all):
    def made(name):
        cache = replace(config.cache, output=str(tmp_path / name))
        return Precomputing(replace(config, cache=cache), tmp_path / f"{name}.paid")

    whole = made("whole")
    assert whole.units
    total = operations_of(made("counted"))

    def going_on(name):
        return made(name).going_on_as(whole)

    kills = killed_everywhere("precompute-ref", going_on, whole, total, is_all=is_all)
    told("precompute-ref", kills, is_all=is_all)


@EXTENT
@pytest.mark.parametrize(("kind", "part"), [(Sampling, "sample"), (Judging, "judge")])
def test_no_answer_that_is_kept_is_asked_for_again(kind, part, sources, tmp_path, told, is_all):
    whole = kind(tmp_path / "whole", sources[kind])
    total = operations_of(whole)

    def made(name):
        return kind(tmp_path / name, sources[kind])

    kills = killed_everywhere(part, made, whole, total, is_all=is_all)
    told(part, kills, is_all=is_all)


@EXTENT
def test_an_export_is_there_whole_or_not_at_all(config, tmp_path, told, is_all):
    run(config)

    def made(name):
        return Exporting(config.cache.output, tmp_path / f"{name}.parquet")

    total = operations_of(made("whole"))
    kills = killed_everywhere("export", made, made("whole"), total, is_all=is_all)
    told("export", kills, is_all=is_all)


@pytest.mark.long
def test_a_training_killed_a_little_later_each_time_keeps_its_steps(course, tmp_path, told):
    whole, kills = Training(course, tmp_path / "whole"), 0
    whole.run()
    for start, pause in ((1, 3), (5, 7)):
        one = Training(course, tmp_path / f"every-{pause}")
        kills += kills_on_the_way(one, itertools.count(start, pause))
        assert one.outcome() == whole.outcome()
    told("train", kills, is_all=True)


@pytest.mark.long
def test_rounds_killed_a_little_later_each_time_sample_once(server, world, tmp_path, told):
    def made(name):
        (tmp_path / name).mkdir()
        return Rounds(server, write_settings(tmp_path / name, world))

    whole, one = made("whole"), made("killed")
    whole.run()
    kills = kills_on_the_way(one, itertools.count(3, 11))
    assert one.outcome() == whole.outcome()
    assert {*one.paid()} == {*whole.paid()}
    told("rounds", kills, is_all=True)
