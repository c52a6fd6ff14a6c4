"""A command that was killed and is given again ends as one that was not."""

import re
from dataclasses import dataclass
from itertools import count

import pytest

from support.refusals import require_names
from support.rounds_play import write_settings
from support.sampling import write_prompts
from support.trainings import KILLED, Person


@dataclass(frozen=True)
class Step:
    """A command, and where it is killed: at one place after the other, in one folder."""

    words: tuple
    kills: tuple  # before or after which operation on the disk, and at which visit
    needs: str = ""  # the step before it


FEW = ("--tokens-per-batch", 1)  # batches of one
SHORT = ("--set", "judge.max_new_tokens=4", "--set", "scoring.tokens_per_batch=1")


def of_table(name):
    """Before the table has its name, and before anybody is told of it."""
    return f"before:rename:{name}.parquet", f"after:rename:{name}.parquet"


JUDGED = ("judge", "whole/sample", "--dtype", "float32")
STEPS = {
    "precompute-ref": Step(
        ("precompute-ref", "pairs.jsonl", "--model", "model", "--shards", 500, *FEW),
        (
            "before:rename:encoded/*.json",  # of what is prepared
            "after:link:plan.json",
            "before:link:commits/*.json@2",  # between two shards
            "after:fsync_folder:commits",
            "before:link:manifest.json",
            "after:link:manifest.json",  # and its work is still there
            "after:remove_tree:.trash-*",
        ),
    ),
    "score": Step(
        ("score", "pairs.jsonl", "--reward-model", "reward", *FEW),
        (
            "after:rename:_align/rewards",  # its mark, before any lock
            "after:link:plan.json",
            "after:fsync_folder:commits",
            "after:link:manifest.json",  # of the cache in it
            "before:rename:_align/rewards",  # it vouches for the rows that it is about to write
        ),
    ),
    "sample": Step(
        ("sample", "prompts.jsonl", "--model", "model", "-n", 2, "--max-new-tokens", 4, *FEW),
        (
            "before:rename:_align/samples",
            "before:fsync:answers-*.jsonl",
            "after:fsync:answers-*.jsonl@2",  # between two batches
            *of_table("samples"),
        ),
    ),
    "rubric": Step(
        (*JUDGED, "--by", "rubric", "--model", "model", *SHORT),
        (
            "after:rename:_align/judged",
            "after:fsync:answers-*.jsonl",
            "before:fsync:answers-*.jsonl@2",
            *of_table("judged"),
        ),
        needs="sample",
    ),
    "reward": Step(
        (*JUDGED, "--by", "reward", "--reward-model", "reward"),
        (
            "after:link:plan.json",
            "after:fsync_folder:commits",
            "after:link:manifest.json",
            *of_table("judged"),
        ),
        needs="sample",
    ),
    "select": Step(
        ("select", "whole/reward", "--keep-cut"),
        ("before:rename:_align/selected", "after:rename:_align/selected", *of_table("selected")),
        needs="reward",
    ),
    "rounds": Step(
        ("rounds", "rounds.yaml"),
        (
            "after:rename:_align/rounds",
            "after:fsync:answers-*.jsonl",
            "after:rename:samples.parquet",
            "after:link:manifest.json",
            "after:update@2",
            "after:rename:model",
            "before:rename:rounds.jsonl",  # the first model has its line by then
            "after:rename:rounds.jsonl",
        ),
    ),
}
WORK = re.compile("scoring|sampling|judging|tokenizing|training|round 1")  # as progress names it
PUBLISHED = (
    *("manifest.json", "data/*", "rows.jsonl"),
    "*.parquet",
    *("rounds.json*", "round-*/*/*.parquet", "round-*/*/*manifest.json", "*/model/model.*"),
)


def whole(person, name):
    """What a command publishes that nobody stopped, after those whose output it reads."""
    folder = person.folder / "whole" / name
    if not folder.exists():
        if needs := STEPS[name].needs:
            whole(person, needs)
        person.gives(*words(name, folder))
    return published(folder)


def words(name, output):
    unrecorded = () if name == "select" else ("--no-mlflow",)
    return (*STEPS[name].words, "--output", output, *unrecorded)


def published(folder):
    """Every file that others read, by its name."""
    found = {path for glob in PUBLISHED for path in folder.glob(glob)}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}


@pytest.fixture(scope="module")
def person(server, world, reward_model, tmp_path_factory):
    """Five prompts, as many pairs, a model and a reward model."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "model").symlink_to(world.model)
    (folder / "reward").symlink_to(reward_model)
    asked = [f"What is {number} and {number}?" for number in range(5)]
    write_prompts(folder / "prompts.jsonl", asked)
    write_prompts(folder / "pairs.jsonl", asked, chosen=[*"24680"], rejected=[*"13579"])
    # Nothing is copied from what nobody stopped.
    (folder / "align.yaml").write_text("cache:\n  reuse_known: false\n")
    write_settings(folder, world, rounds={"count": 1}, cache={"reuse_known": False})
    return Person(server, folder, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", STEPS)
def test_a_killed_command_ends_as_one_that_is_not(person, name, tmp_path):
    expected, given = whole(person, name), words(name, tmp_path / "out")
    assert expected
    for place in STEPS[name].kills:
        moment, _, visit = place.partition("@")
        answer = person.tries(*given, faults=f"{moment}=kill@{visit or 1}")
        assert answer.code == KILLED, (place, answer)
    said = person.gives(*given).out
    assert published(tmp_path / "out") == expected
    require_paid_once(tmp_path / "out")
    # Given once more, it has nothing to make and says the same of what is there.
    again = person.gives(*given)
    assert not WORK.search(again.err), again.err
    assert published(tmp_path / "out") == expected
    assert again.out.splitlines()[0] == said.splitlines()[0]


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_a_command_killed_a_little_later_each_time_ends_as_one_that_is_not(person, name, tmp_path):
    """Before its nth change of the disk, a larger n each time, until it ends."""
    expected, given = whole(person, name), words(name, tmp_path / "out")
    for number in count(1, 2):
        answer = person.tries(*given, faults=f"before:*=kill@{number}")
        if answer.code == 0:
            break
        assert answer.code == KILLED, answer
    assert published(tmp_path / "out") == expected
    require_paid_once(tmp_path / "out")


def require_paid_once(folder):
    """Requires that no answer is stored twice."""
    files = folder.glob("_align/answers/*.jsonl")
    answers = [line for file in files for line in file.read_bytes().splitlines()]
    assert len(answers) == len({*answers})


# Where the first of two parts is killed.
KILLS_A_PART = {
    "precompute-ref": "after:fsync_folder:commits",
    "sample": "after:fsync:answers-*.jsonl",
    "rubric": "after:fsync:answers-*.jsonl",
}


@pytest.mark.parametrize("name", KILLS_A_PART)
def test_the_whole_command_ends_what_a_killed_part_has_begun(person, name, tmp_path):
    expected, given = whole(person, name), words(name, tmp_path / "out")
    killed = person.tries(*given, "--part", "1/2", faults=f"{KILLS_A_PART[name]}=kill")
    assert killed.code == KILLED, killed
    said = person.gives(*given, "--part", "2/2").out
    require_names(said, "part 2/2", tmp_path / "out", "--part")
    tables = {"manifest.json", "samples.parquet", "judged.parquet"}
    assert not tables & published(tmp_path / "out").keys()
    person.gives(*given)
    assert published(tmp_path / "out") == expected
