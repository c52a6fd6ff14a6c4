"""Damages the folders of trainings, or signs wrong ones anew, and opens them as the commands do.

A case ends well if what comes of it is what comes of the whole folder, bit for bit, also where an
earlier checkpoint had to do; or, of one that was signed anew, what a run may hold; or if one
message names the file or a folder that it is in.
"""

import math
import random
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import runner  # noqa: E402
from campaigns.cases import Campaign, End, tried  # noqa: E402

# Imported by who tries cases: it takes seconds.
MODULES = ("campaigns.opened_runs", "campaigns.damaged_runs")
DOORS = {
    "paused": ("resume", "resume", "resume", "resized", "report", "load"),
    "finished": ("again", "diff", "longer", "sweep", "policy", "report", "load"),
}
CONTINUED = ("resume", "resized", "longer")
TRAINED = (*CONTINUED, "policy")


def drawn(seed):
    """Whether the run of a seed is finished, and what opens it."""
    draw = random.Random(f"run folder {seed}")
    name = draw.choice(("paused", "paused", "finished"))
    return draw, name, draw.choice(DOORS[name])


def name_of(seed):
    """How the folder of a seed is opened, and its kind."""
    _, name, door = drawn(seed)
    return f"{door} {name}"


def prepare(folder):
    """Made once in a process."""
    import_module(MODULES[0]).Runs.prepare(folder)


def case(seed, folder):
    """Opens a damaged run."""
    opened, damaged_runs = map(import_module, MODULES)
    draw, name, door = drawn(seed)
    whole = opened.Runs.of_whole(name, door)
    run = opened.Runs.copy(name)
    done = damaged_runs.damage(run, draw, is_continued=door in CONTINUED)
    outside = run.with_name("outside")
    before = opened.contents_of(outside)
    with opened.Runs.watch:
        judge = partial(judged, whole, door, done)
        end = tried(lambda: opened.OPENED[door](run), done.files, judge)
    if opened.Runs.watch.seen:
        end = replace(end, outcome="wrong", detail=f"it did {opened.Runs.watch.seen[:2]}")
    if opened.contents_of(outside) != before:
        end = replace(end, outcome="wrong", detail="what a link named was changed")
    return replace(end, detail=f"{done.what}: {end.detail}"[:900])


def judged(whole, door, done, found):
    """Whether what came of a run is that of the whole folder, or fits what was signed."""
    if found == whole:
        return End("same")
    if door not in TRAINED:
        said = str(found)
        if done.is_signed or done.is_lost or any(name in said for name in done.files):
            return End("changed")
        return End("wrong", f"{first_difference(said, str(whole))}")
    weights, lines = found[-1] if door != "policy" else found
    known, all_lines = whole[-1] if door != "policy" else whole
    # A longer run that begins anew has its lines at other steps.
    if weights == known and (door == "longer" or lines == all_lines[len(all_lines) - len(lines) :]):
        return End("changed", "only what was lost is missing")
    if door == "resized" and not done.is_signed and are_near((weights, lines), (known, all_lines)):
        return End("changed", "an earlier checkpoint, rounded elsewhere")
    if not (done.is_signed or door == "policy"):
        return End("wrong", "other weights" if weights != known else "other metrics")
    if done.is_impossible:
        return End("wrong", "it is used")
    if fault := fault_of(weights, known, lines):
        return End("wrong", fault)
    return End("changed")


def first_difference(one, other):
    """Where two texts part."""
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return f"{one[max(0, at - 40) : at + 80]!r} and not {other[max(0, at - 40) : at + 80]!r}"


def are_near(found, whole):
    """Whether all numbers are the same but for their last digits."""
    if isinstance(found, dict):
        return found.keys() == whole.keys() and all(
            are_near(found[key], whole[key]) for key in found
        )
    if isinstance(found, list | tuple):
        return len(found) == len(whole) and all(map(are_near, found, whole))
    if isinstance(found, float):
        return math.isclose(found, whole, rel_tol=1e-3, abs_tol=1e-5)
    return found == whole


def fault_of(weights, known, lines):
    """What no training leaves."""
    shapes = {name: (kind, len(flat(one))) for name, (kind, one) in weights.items()}
    if shapes != {name: (kind, len(flat(one))) for name, (kind, one) in known.items()}:
        return "weights of other shapes"
    if not all(map(math.isfinite, (x for _, one in weights.values() for x in flat(one)))):
        return "weights that are not finite"
    steps = [line["step"] for line in lines]
    return "" if steps == sorted(steps) else f"steps {steps}"


def flat(values):
    """Nested lists of numbers as one list."""
    if not isinstance(values, list):
        return [values]
    return [x for one in values for x in flat(one)]


def without_digests():
    """Leaves out that a file of a checkpoint has to have the digest in its record."""
    from align.stages.storage.run import checkpoints  # noqa: PLC0415

    checkpoints._fault_of = lambda *arguments: ""


PLANTS = {"digests": without_digests}
CAMPAIGN = Campaign(__file__, name_of, case, prepare, PLANTS)

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
