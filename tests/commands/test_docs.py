"""What the README and the pages of docs/ say is so."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import warnings
from functools import partial

import pytest
import typer
import yaml

from align import __version__, cli
from align.pipeline.jobs.signals import STOPS
from align.pipeline.options.settings import load_settings
from align.pipeline.options.settings_table import COMMANDS as WITH_SETTINGS
from align.schemas.cache import Manifest
from align.schemas.errors import AlignError, Interrupted
from align.schemas.rows import REASONS
from align.stages.data.columns import OURS
from align.stages.data.shapes import OPTIONAL, SHAPES, Shape
from align.stages.demo import tiny_world
from align.stages.methods.method_docs import markdown_table
from align.stages.methods.table import METHODS, objective_of
from align.stages.storage.shards import RESERVED
from support.command import align, said_by, success
from support.pages import PAGES, blocks, codes, commands, links, name_of, page
from support.rooms import ROOT

COMMANDS = typer.main.get_command(cli.app).commands
PLACE = re.compile(r"(cli\.py|(schemas|pipeline|stages|tests|docs|examples)/[\w./-]*)")
RECIPES = ROOT / "pipeline" / "options" / "recipes"
# `cd FOLDER && NAME=VALUE .venv/bin/align …`: the words before `align` may be missing.
CALL = re.compile(r"(cd (?P<folder>\S+) && )?([A-Z_]+=\S+ )?(\S*/)?align (?P<words>.+)")
pytestmark = pytest.mark.usefixtures("here")  # where no align.yaml lies


def take(words):
    """Reads a command as the real one is read, its settings and methods too; runs nothing."""
    name, *rest = words
    if name in {"--help", "--version"}:
        return
    with COMMANDS[name].make_context(name, list(rest)) as context:
        given = context.params
    sets = [*(given.get("--set") or [])]
    for varied in given.get("vary") or []:
        setting, _, values = varied.partition("=")
        sets.append(f"{setting}={values.split(',')[0]}")
    command = name if name in WITH_SETTINGS else "config"
    method = load_settings({}, sets, file=None, command=command).config.method
    asked = given.get("methods") or [given.get("train.method")]
    for objective in filter(None, asked):
        objective_of(objective, method)


def test_the_help_of_every_command_ends_with_an_example_that_is_taken():
    for name, command in COMMANDS.items():
        _, first, *words = shlex.split(command.epilog)
        assert (first, words[0]) == ("align", name)
        assert not why_refused(*words), command.epilog


def why_refused(*words):
    """What is said to a command that is not taken; nothing to one that is."""
    try:
        take(words)
    except Exception as error:  # typer's, ours, or of a name that there is not
        return f"{type(error).__name__}: {error}"
    return ""


def test_every_command_is_one_that_the_command_line_takes():
    given = [(name_of(path), words) for path in PAGES for words in commands(path)]
    given += [(name_of(path), words) for path in PAGES for words in inline_commands(path)]
    given += [("many processes", words) for words in commands_of_scripts()]
    given += [("recipes", words) for words in commands_of_recipes()]
    given += [("release", words) for words in commands_of_release()]
    demo = list(filter(None, map(CALL.fullmatch, steps_of_demo())))
    assert len(demo) > 3
    given += [("demo", shlex.split(called["words"])) for called in demo]
    assert not [(name, words, said) for name, words in given if (said := why_refused(*words))]
    # It would pass for nothing if no command were found or none refused.
    assert {"README.md", "docs/getting-started.md", "docs/caches.md"} <= {name for name, _ in given}
    names = {"precompute-ref", "train", "sweep", "score", "--version", "tiny-world"}
    assert {words[0] for _, words in given} >= names
    assert "No such option" in why_refused("train", "--methd", "dpo")
    assert "train.lrr" in why_refused("train", "--set", "train.lrr=1")


def inline_commands(path):
    """Whole commands in running text: those that leave nothing to be filled in."""
    texts = [text for text in codes(path) if re.fullmatch(r"align [^A-Z…]+ [^A-Z…]+", text)]
    return [shlex.split(text)[1:] for text in texts]


def commands_of_recipes():
    """Those at the head of each recipe; two blanks begin what is said of one."""
    for recipe in RECIPES.glob("*.yaml"):
        for line in re.findall(r"^#   (.+)", recipe.read_text(encoding="utf-8"), re.MULTILINE):
            command = line.partition("  ")[0].partition("align ")[2]
            yield shlex.split(command)


def commands_of_scripts():
    """Those of batch scripts and of an indexed Job, whose shells put the part in."""
    scripts = blocks(page("docs/clusters.md"))
    for script in (block.text for block in scripts if block.language in {"bash", "yaml"}):
        (found,) = re.findall(r"align precompute-ref(?:[^\n]|\n\s+--)+", script)
        given = re.sub(r"\$part|\$\(\(.*\)\)/8", "2/8", found)
        yield shlex.split(given.rstrip('"') if given.count('"') % 2 else given)[1:]


def commands_of_release():
    """What the workflow tries of the package that it has built."""
    workflow = yaml.safe_load(page(".github/workflows/release.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    return [shlex.split(called["words"]) for called in filter(None, map(CALL.fullmatch, steps))]


def steps_of_demo():
    """What `make demo` does once there is an environment."""
    make = ("make", "--no-print-directory", "--dry-run", "--always-make", "demo", "PYTHON=python")
    return said_by(*make, cwd=ROOT).partition("rm -rf demo")[2].splitlines()[1:]


def test_every_file_that_is_named_exists():
    """And those that are linked; whether their headings are there, `make docs` looks at."""
    linked = [(path, target.partition("#")[0]) for path in PAGES for target in links(path)]
    local = [(path, file) for path, file in linked if not re.match("https?:", file)]
    assert not [(path, file) for path, file in local if not (path.parent / file).exists()]
    named = {text for path in PAGES for text in codes(path) if PLACE.fullmatch(text)}
    assert not [name for name in named if not page(name).exists()]


def test_language_models_get_an_index_of_plain_pages(tmp_path):
    runpy.run_path(page("docs/conf.py"))["write_plain"](tmp_path)
    linked = {*links(tmp_path / "llms.txt")}
    assert linked == {path.name for path in page("docs").glob("*.md")} - {"index.md"}
    assert linked == {path.name for path in tmp_path.glob("*.md")}
    assert "align precompute-ref" in (tmp_path / "cli.md").read_text(encoding="utf-8")
    assert "train.lr" in {*codes(tmp_path / "settings.md")}


def test_what_a_person_looks_up_is_on_its_page():
    kinds = [AlignError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = {kind.exit_code for kind in kinds} | {Interrupted(one).exit_code for one in STOPS}
    assert {2, 3, 4, 5, 6, 74, 75, 130} <= found
    told = page("docs/troubleshooting.md").read_text(encoding="utf-8")
    assert not [code for code in found if not re.search(rf"\b{code}\b", told)]

    def named_on(name):
        return {*codes(page(name))}

    told = {text.split()[1] for text in named_on("README.md") if text.startswith("align ")}
    assert {*COMMANDS} <= told
    assert {*RESERVED, *Manifest.__dataclass_fields__} <= named_on("docs/cache-format.md")
    assert {*REASONS} <= named_on("docs/data.md")
    recipes = {path.stem for path in RECIPES.glob("*.yaml")}
    assert recipes
    assert recipes <= named_on("docs/choosing-a-method.md")
    table = markdown_table(METHODS.values())
    assert align("methods", "--markdown").out == table
    assert table in page("docs/methods.md").read_text(encoding="utf-8")
    citation = yaml.safe_load(page("CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__


def test_an_example_of_data_is_shown_as_it_is_and_read(world, tmp_path):
    formats = page("docs/data.md")
    ((_, renamed, *columns),) = commands(formats)  # what the page says to pass with this one
    for path in sorted(page("examples/data").iterdir()):
        assert f"../examples/data/{path.name}" in links(formats)
        assert path.read_text(encoding="utf-8") in [block.text for block in blocks(formats)]
        told = columns if path.name == renamed else []
        cache = tmp_path / path.name
        output = ("--model", world.model, "--output", cache, "--no-mlflow")
        success("precompute-ref", path, *output, *told)
        summary = json.loads(align("inspect", cache, "--json").out)
        kind, *_ = path.stem.split("-")
        roles = {"unpaired": {"desirable", "undesirable"}, "scored": {"candidate"}}
        expected = roles.get(kind, {"chosen", "rejected"}) | {"mismatched"}
        assert set(summary["roles"]) == expected
        assert not (cache / "rejected.parquet").exists()


def follow(server, steps, folder, uri):
    """Runs lines of a shell: what calls `align` by the server, the rest by bash; what is said."""
    store = {"MLFLOW_TRACKING_URI": uri}  # one for all pages: to make one takes seconds
    told = []
    for step in steps:
        if called := CALL.fullmatch(step):
            where = folder / (called["folder"] or "")
            words = shlex.split(called["words"], comments=True)
            answer = server.fork(words, where, store).answer()
            assert answer.code == 0, (step, answer)
            told.append(answer.out)
        else:
            subprocess.run(["bash", "-euc", step], cwd=folder, check=True, capture_output=True)
    return told


def test_the_first_commands_of_the_readme_run(server, world, tmp_path, uri):
    """All but the installation, which test_wheel.py does; numbers are those of other rows."""
    lines = [line for block in blocks(page("README.md"), "sh") for line in block.lines]
    steps = [line for line in lines if not line.startswith("pip")]
    shutil.copytree(world.model, tmp_path / "path" / "to" / "model")
    shutil.copy(world.data.paired, tmp_path / "data.parquet")
    told = follow(server, steps, tmp_path, uri)
    shown = [block.text for block in blocks(page("README.md"), "text")]
    told = [without_numbers(text) for text in (told[0], told[-1])]
    assert told == [without_numbers(one) for one in shown]
    for name in ("align-run/model", "kto-run/model/config.json", "kto-run/report.html"):
        assert (tmp_path / name).exists()


def without_numbers(text):
    return re.sub(r"id [0-9a-f]+|[\d.,]+( steps?)?", "#", text)


def test_getting_started_ends_where_it_says(server, tmp_path, uri, monkeypatch, capsys):
    """On fewer rows than the page takes, with a model that has learned nothing."""
    pages = (page("docs/getting-started.md"), page("docs/cache-format.md"))
    shown, made, *steps = [line for block in blocks(pages[0], "sh") for line in block.lines]
    monkeypatch.setattr(tiny_world, "make_world", partial(tiny_world.make_world, pretrain_steps=0))
    success(*made.replace("--rows 200", "--rows 24").split()[1:])
    follow(server, [shown, *steps], tmp_path, uri)
    for name in ("align-run/model/config.json", "align-run/report.html", "align-sweep/sweep.html"):
        assert (tmp_path / name).is_file()
    code = "\n".join(block.text for path in pages for block in blocks(path, "python"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a file stays open, as in a notebook
        exec(code, {})
    told = capsys.readouterr().out
    assert "Question" in told
    assert "24 ['row_id', 'source'" in told


def shapes_of_others():
    """A line for each shape of others, as the line that says what its columns are read as."""
    for one in SHAPES:
        if one.name not in OURS:
            names = {name: name for name in (*one.columns, *one.optional)}
            told = Shape(one, names, (*one.optional, *(n for n in OPTIONAL if n in names))).read_as
            yield f"| {one.name} | {told.partition(' rows: ')[2].replace('->', '→')} |\n"


def test_the_page_of_data_formats_has_the_table_of_shapes():
    text = page("docs/data.md").read_text(encoding="utf-8")
    assert "".join(shapes_of_others()) in text
    ours = [one for one in SHAPES if one.name in OURS]
    columns = {name for one in ours for name in (*one.columns, *one.scores)}
    assert columns <= {*codes(page("docs/data.md"))}
