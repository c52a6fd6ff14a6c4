"""What docs/extending.md and docs/adding-a-method.md tell a person to add works."""

import json
import os
import shutil
import sys

from align import load_cache
from align.stages.storage.tables import TableFolder, read_table
from support.pages import blocks, page, programs_under
from support.programs import TESTS, said_by
from support.rooms import ROOMS, ROOT
from support.sample_tables import sample_table

EXTENDING = page("docs/extending.md")
# Commands one after the other in one process: most of a short one is imports.
MAIN = """
import json, sys
from support.command import align

answers = [vars(align(*words)) for words in json.loads(sys.argv[1])]
print("\\n" + json.dumps(answers))
"""


class Copy:
    """A copy of the package, to be changed."""

    def __init__(self, folder):
        self.folder, self.package = folder, folder / "align"
        for room in ROOMS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / room, self.package / room, ignore=ignored)
        for file in ROOT.glob("*.py"):
            shutil.copy(file, self.package)

    def put(self, file, before, after):
        """Changes one spot of a file."""
        source = self.package / file
        assert source.read_text().count(before) == 1
        source.write_text(source.read_text().replace(before, after))

    def add(self, file, text):
        """A new file."""
        (self.package / file).write_text(text)

    def align(self, *commands):
        """What each command says, which it has to end well."""
        answers = self.answers(*commands)
        assert not any(answer["code"] for answer in answers), answers
        return [answer["out"] for answer in answers]

    def answers(self, *commands):
        """How each command ends, and what it says."""
        words = json.dumps([[*map(str, words)] for words in commands])
        paths = os.pathsep.join((str(self.folder), str(TESTS)))
        program = (sys.executable, "-c", MAIN, words)
        said = said_by(*program, cwd=self.folder, PYTHONPATH=paths)
        return json.loads(said.splitlines()[-1])


def precompute(data, model, output, *options):
    """The command that makes a cache with nothing in it that was known before."""
    words = ("precompute-ref", data, "--model", model, "--output", output)
    return (*words, "--set", "cache.reuse_known=false", "--no-mlflow", *options)


def test_a_judge_is_added_as_its_page_shows(tmp_path):
    program, line, names = programs_under(EXTENDING, "A judge")
    copy = Copy(tmp_path)
    copy.add("pipeline/tables/length_judge.py", program)
    copy.put("pipeline/tables/judges.py", '"reward": (', f'{line.strip()} "reward": (')
    copy.put("schemas/round_options.py", '"none", "reward"', f'{names.strip()}, "reward"')
    samples = sample_table(tmp_path / "samples", {"Why?": ["Because.", "So."]})
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "Why?", "chosen": "So.", "rejected": "Because."}\n')
    by = ("--by", "length", "--output", "judged", "--no-mlflow")
    once = ("judge", samples, *by)
    first, again, calibrated = copy.align(once, once, ("judge", "--calibrate", pairs, *by))
    assert "2 judgments" in first
    assert "2 known" in again
    assert "gold" in calibrated
    table = read_table(TableFolder(tmp_path / "judged", "judged"))[1]
    assert table["score"].to_list() == [-8.0, -3.0]


def test_a_data_shape_is_added_as_its_page_shows(tmp_path, world):
    program, line = programs_under(EXTENDING, "A data shape")
    copy = Copy(tmp_path)
    copy.add("stages/data/ranked_rows.py", program)
    begun = "SHAPES = (\n"
    added = f"from .ranked_rows import behind\n\n{begun}{line}"
    copy.put("stages/data/shapes.py", begun, added)
    answers = [" nine.", " seven, of course.", " the sky is blue."]
    of_shape = {
        "scored": {"completions": answers, "scores": [2.0, 1.0, 0.0]},
        "ranked": {"answers": answers},
        "neither": {"choices": answers},
    }
    commands = []
    for name, columns in of_shape.items():
        rows = [{"prompt": prompt, **columns} for prompt in ("which is larger?", "what color?")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        words = ("--map", "ranking=answers") if name == "ranked" else ()
        commands.append(precompute(f"{name}.jsonl", world.model, name, *words))
    *taken, refused = copy.answers(*commands)
    assert [answer["code"] for answer in (*taken, refused)] == [0, 0, 2], taken
    assert "'choices'" in refused["err"]
    scored, ranked = (load_cache(tmp_path / name).collect() for name in ("scored", "ranked"))
    assert ranked.equals(scored)
    assert ranked["scores"].to_list() == [[2.0, 1.0, 0.0]] * 2


def test_a_method_is_added_as_its_page_shows(tmp_path, training_world):
    (loss,) = (block.text for block in blocks(page("docs/adding-a-method.md")) if block.language)
    copy = Copy(tmp_path)
    losses = copy.package / "stages/methods/losses.py"
    losses.write_text(losses.read_text() + loss)
    trained = ("--cache", training_world.pairs, "--max-steps", 2, "--batch-size", 4, "--no-mlflow")
    told, done = copy.align(("methods", "square"), ("train", "--method", "square", *trained))
    assert "(b D - t)^2" in told
    assert "margin of rewards that is wanted" in told
    assert "2 steps" in done
