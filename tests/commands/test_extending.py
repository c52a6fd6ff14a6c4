"""The method that docs/extending.md adds works."""

import json
import shutil
import sys

from support.command import said_by
from support.pages import page, programs_under
from support.rooms import ROOMS, ROOT, TESTS

# Commands one after the other in one process: most of a short one is imports.
MAIN = """
import json, sys
from support.command import align

for words in json.loads(sys.argv[1]):
    answer = align(*words)
    assert answer.code == 0, answer
    print(answer.out)
"""


def test_a_method_is_added_as_its_page_shows(tmp_path, training_world):
    package = tmp_path / "align"
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, package)
    (loss,) = programs_under(page("docs/extending.md"), "A method")
    with (package / "stages/methods/losses.py").open("a") as losses:
        losses.write(loss)
    cache = ("--cache", str(training_world.pairs), "--batch-size", "4")
    train = ("train", "--method", "square", *cache, "--max-steps", "2", "--no-mlflow")
    program = (sys.executable, "-c", MAIN, json.dumps([("methods", "square"), train]))
    told = said_by(*program, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{TESTS}")
    for said in ("(b D - t)^2", "target of the reward margin", "2 steps"):
        assert said in told
