"""What the README and the pages of docs/ say is so."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import typer
import yaml

from align import __version__, cli
from align.pipeline.settings import flatten, load_settings
from align.pipeline.signals import STOPS
from align.schemas.cache import FORMAT_VERSION, Manifest
from align.schemas.config import Config
from align.schemas.errors import AlignError, Interrupted
from align.schemas.rows import REASONS
from align.stages.methods.method_docs import describe, markdown_table
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS, recipe_of
from align.stages.storage.shards import shard_schema
from support.command import align
from support.pages import PAGES, ROOT, anchors, blocks, codes, commands, links, name_of, page
from support.rooms import ROOMS

COMMANDS = typer.main.get_command(cli.app).commands
FLAGS = {
    flag
    for command in COMMANDS.values()
    for parameter in command.params
    for flag in (*parameter.opts, *parameter.secondary_opts)
}
# Of other programs, named in our text.
FOREIGN = {"--index-url", "--signal", "--max-restarts", "--no_ssh", "--node_rank"}
TAKERS = ("train", "precompute-ref")  # of options that stand in the text without a command
MOVING = page("docs/moving-from-other-tools.md")  # the first column of its tables is theirs
SETTINGS = {*flatten(Config())}
METHOD_OPTIONS = {
    *(option.name for method in METHODS.values() for option in describe(method).options),
    *Modifiers.__dataclass_fields__,
}
PLACE = re.compile(r"(cli\.py|(schemas|pipeline|stages|tests|docs|examples)/[\w./-]*)")
TO_BE_WRITTEN = {"stages/methods/square.py"}  # by who adds a method
SETTING = re.compile(
    "(?P<section>model|data|tokens|cache|scoring|tracking|train|lora|rewards|objects|method"
    "|server|sample|judge|select|rounds)"
    "[.](?!yaml|html)(?P<name>[A-Za-z0-9_.]+)(=.*)?"
)
# `cd FOLDER && NAME=VALUE .venv/bin/align …`: the words before `align` may be missing.
CALL = re.compile(r"(cd (?P<folder>\S+) && )?([A-Z_]+=\S+ )?(\S*/)?align (?P<words>.+)")
EXAMPLES = sorted(page("examples/data").iterdir())
GIVEN = [(name_of(path), words) for path in PAGES for words in commands(path)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No align.yaml lies where a command is read."""
    monkeypatch.chdir(tmp_path)


def take(words):
    """Reads a command as the real one is read, its settings and methods too; runs nothing."""
    name, *rest = words
    if name == "--help":
        return
    with COMMANDS[name].make_context(name, list(rest)) as context:
        given = context.params
    sets = [*(given.get("sets") or [])]
    for varied in given.get("vary") or []:
        setting, _, values = varied.partition("=")
        sets.append(f"{setting}={values.split(',')[0]}")
    reader = f"{name} --from-labels" if given.get("from_labels") else name
    method = load_settings({}, sets, file=None, command=reader).config.method
    asked = given.get("methods") or [given.get("method")]
    for recipe in filter(None, asked):
        recipe_of(recipe, method)


def why_refused(*words):
    """What is said to a command that is not taken; nothing to one that is."""
    try:
        take(words)
    except Exception as error:  # typer's, ours, or of a name that there is not
        return f"{type(error).__name__}: {error}"
    return ""


def test_every_command_is_one_that_the_command_line_takes():
    assert not [(name, words, said) for name, words in GIVEN if (said := why_refused(*words))]


def test_commands_are_found_wherever_they_are_and_wrong_ones_are_refused():
    """The test above would pass for nothing otherwise."""
    assert {"README.md", "docs/getting-started.md", "docs/caches.md"} <= {name for name, _ in GIVEN}
    assert {words[0] for _, words in GIVEN} >= {"precompute-ref", "train", "sweep", "score", "gc"}
    assert "No such option" in why_refused("train", "--methd", "dpo")
    assert "train.lrr" in why_refused("train", "--set", "train.lrr=1")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_flags_and_settings_in_the_text_exist(path):
    for code in codes(path):
        if path == MOVING and not code.column:
            continue
        is_whole = not re.search("[A-Z…]", code.text)
        words = shlex.split(code.text) if code.text.startswith("align ") else code.text.split()
        if words[0] == "align" and len(words) > 2 and is_whole:
            assert not why_refused(*words[1:]), code.text
        elif words[0] == "align":
            assert words[1:2] == [] or words[1] in COMMANDS or words[1] == "--help", code.text
        else:
            for match in filter(None, map(SETTING.fullmatch, words)):
                assert is_setting(match["section"], match["name"]), code.text
        if words[0].startswith("--"):
            flags = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
            assert flags <= FLAGS | FOREIGN, code.text
        if words[0] in {"--set", "--method"} and len(words) > 1 and is_whole:
            assert not all(why_refused(name, *words) for name in TAKERS), code.text


def is_setting(section, name):
    """Whether there is such a setting; an option of a mixture has its method's name before it."""
    if section == "method":
        return name == "NAME" or name.rpartition(".")[2] in METHOD_OPTIONS
    return f"{section}.{name}" in SETTINGS


def test_no_link_is_dead():
    dead = [
        (name_of(path), target)
        for path in PAGES
        for target in links(path)
        if not re.match("https?:", target) and not is_alive(path, *target.partition("#")[::2])
    ]
    assert not dead


def is_alive(path, file, anchor):
    """Whether a file of the checkout is there, and the heading in it."""
    linked = (path.parent / file).resolve() if file else path
    is_here = linked.exists() and linked.is_relative_to(ROOT)
    return is_here and (not anchor or anchor in anchors(linked))


def test_every_file_and_folder_of_the_tree_that_is_named_exists():
    named = {code.text for path in PAGES for code in codes(path) if PLACE.fullmatch(code.text)}
    assert not [name for name in named - TO_BE_WRITTEN if not page(name).exists()]


def named_on(name):
    return {code.text for code in codes(page(name))}


def test_every_page_and_every_command_is_where_people_look_for_it():
    listed = set(links(page("docs/index.md")))
    assert listed == {path.name for path in page("docs").glob("*.md")} - {"index.md"}
    told = {text.split()[1] for text in named_on("README.md") if text.startswith("align ")}
    assert {*COMMANDS} <= told


def test_every_exit_code_is_on_its_page():
    told = page("docs/errors.md").read_text(encoding="utf-8")
    kinds = [AlignError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = {kind.exit_code for kind in kinds}
    assert {2, 3, 4, 5, 6, 74, 75} <= codes
    assert not [code for code in codes if f"| {code} |" not in told]
    assert ", ".join(str(Interrupted(number).exit_code) for number in sorted(STOPS)) in told


def test_everything_that_a_cache_and_its_rejected_rows_name_is_on_its_page():
    columns = shard_schema(token_logps=True, carried=()).names
    assert {*columns, *Manifest.__dataclass_fields__} <= named_on("docs/cache-format.md")
    assert f"| {FORMAT_VERSION}; another" in page("docs/cache-format.md").read_text("utf-8")
    assert {*REASONS} <= named_on("docs/data-formats.md")


def test_the_table_of_methods_is_the_one_that_align_methods_prints():
    table = markdown_table(METHODS.values())
    assert align("methods", "--markdown").out == table
    assert table in page("docs/methods.md").read_text(encoding="utf-8")


@pytest.mark.slow  # it loads a model for each
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_of_data_is_shown_as_it_is_and_read(path, world, tmp_path):
    formats = page("docs/data-formats.md")
    assert f"../examples/data/{path.name}" in links(formats)
    assert path.read_text(encoding="utf-8") in [block.text for block in blocks(formats)]
    ((_, renamed, *columns),) = commands(formats)  # what the page says to pass with this one
    told = columns if path.name == renamed else []
    output = ("--model", world.model, "--output", tmp_path / "cache", "--no-mlflow")
    answer = align("precompute-ref", path, *output, *told)
    assert answer.code == 0, answer
    summary = json.loads(align("inspect", tmp_path / "cache", "--json").out)
    kind, *_ = path.stem.split("-")
    roles = {"unpaired": {"desirable", "undesirable"}, "scored": {"candidate"}}
    expected = roles.get(kind, {"chosen", "rejected"}) | {"mismatched"}
    assert set(summary["roles"]) == expected
    assert not (tmp_path / "cache" / "quarantine").exists()


def follow(server, steps, folder):
    """Runs lines of a shell: what calls `align` by the server, the rest by bash."""
    for step in steps:
        if called := CALL.fullmatch(step):
            answer = server.run(
                *shlex.split(called["words"]), cwd=folder / (called["folder"] or "")
            )
            assert answer.code == 0, (step, answer)
        else:
            subprocess.run(["bash", "-euc", step], cwd=folder, check=True, capture_output=True)


def test_the_first_commands_of_the_readme_run(server, world, tmp_path):
    """All but the installation, which tests/test_wheel.py does."""
    (first,) = blocks(page("README.md"), "sh")
    install, *steps = first.lines
    assert install.startswith("pip install ")
    shutil.copytree(world.model, tmp_path / "path" / "to" / "model")
    shutil.copy(world.data.paired, tmp_path / "data.parquet")
    follow(server, steps, tmp_path)
    for name in ("align-run/model/config.json", "align-run/report.html", "dpo-run/model"):
        assert (tmp_path / name).exists()


def steps_of_demo():
    """What `make demo` does once there is an environment."""
    make = ("make", "--no-print-directory", "--dry-run", "--always-make", "demo", "PYTHON=python")
    return run(*make, cwd=ROOT).partition("rm -rf demo")[2].splitlines()[1:]


@pytest.mark.slow
def test_the_demo_gives_commands_that_are_taken():
    called = [found for step in steps_of_demo() if (found := CALL.fullmatch(step))]
    assert len(called) > 3
    assert not [said for one in called if (said := why_refused(*shlex.split(one["words"])))]


@pytest.mark.long
def test_the_demo_runs(server, tmp_path):
    """On fewer rows than `make demo` takes."""
    first, *steps = steps_of_demo()
    (tmp_path / "demo").mkdir()
    follow(server, [first.replace("demo/world", "demo/world --rows 60", 1), *steps], tmp_path)
    for method in ("kto", "dpo", "orpo"):
        assert (tmp_path / "demo" / "align-sweep" / method / "model" / "config.json").is_file()


def test_getting_started_ends_where_it_says(server, tmp_path):
    """On fewer rows than the page takes."""
    pages = (page("docs/getting-started.md"), page("docs/cache-format.md"))
    steps = [line for block in blocks(pages[0], "sh") for line in block.lines]
    follow(server, [step.replace("--rows 200", "--rows 60") for step in steps], tmp_path)
    for name in ("align-run/model/config.json", "align-run/report.html", "align-sweep/sweep.html"):
        assert (tmp_path / name).is_file()
    code = "\n".join(block.text for path in pages for block in blocks(path, "python"))
    told = run(sys.executable, "-c", code, cwd=tmp_path)
    assert "Question" in told
    assert "60 ['row_id', 'source'" in told


def test_a_method_is_added_as_its_page_shows(tmp_path, training_world):
    loss, import_line, row = (
        block.text for block in blocks(page("docs/adding-a-method.md")) if block.language
    )
    package = tmp_path / "align"
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, package)
    (package / "stages" / "methods" / "square.py").write_text(loss)
    table = package / "stages" / "methods" / "table.py"
    text = table.read_text()
    assert "\n_FAMILIES = (\n" in text
    table.write_text(text.replace("\n_FAMILIES = (\n", f"\n{import_line}\n\n_FAMILIES = (\n{row}"))

    trained = ("--cache", training_world.pairs, "--max-steps", 2, "--batch-size", 4, "--no-mlflow")
    code = "import sys\nfrom align import cli\n"
    for words in (("methods", "square"), ("train", "--method", "square", *trained)):
        argv = ["align", *map(str, words)]
        code += f"sys.argv = {argv}\ntry:\n    cli.main()\nexcept SystemExit:\n    pass\n"
    told = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "(b D - t)^2" in told
    assert "margin of rewards that is wanted [a number above 0]" in told
    assert "2 steps done" in told


def run(*program, cwd, **environment):
    """What a program says that must end well."""
    done = subprocess.run(
        [*map(str, program)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_where_people_look_for_it():
    citation = yaml.safe_load(page("CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert f"\n## {__version__}\n" in page("CHANGELOG.md").read_text(encoding="utf-8")


def test_github_runs_what_ci_runs_on_every_python_that_is_named():
    workflow = yaml.safe_load(page(".github/workflows/ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    metadata = tomllib.loads(page("pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (\d\.\d+)", " ".join(metadata["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == named


MANY = page("docs/many-processes.md")


@pytest.mark.parametrize("script", [block.text for block in blocks(MANY, "bash")])
def test_a_batch_script_is_one_that_bash_reads_and_gives_a_command_of_ours(script, tmp_path):
    path = tmp_path / "parts.sbatch"
    path.write_text(script)
    assert not subprocess.run(["bash", "-n", path], capture_output=True, check=True).stderr
    (line,) = (line for line in script.splitlines() if "align precompute-ref" in line)
    part = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "8"}
    given = re.sub(r'^rest="|"$', "", line) if line.startswith("rest=") else line
    words = shlex.split(given.replace("$part", "/".join(part.values())))
    take(words[1:])


def test_the_job_of_kubernetes_runs_every_part_once():
    ((job,),) = ([*yaml.safe_load_all(block.text)] for block in blocks(MANY, "yaml"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"  # which backoffLimitPerIndex needs
    (container,) = pod["containers"]
    assert container["command"] == ["/bin/sh", "-c"]
    (script,) = container["args"]
    shown = script.replace("exec align", "printf '%s\\n'")
    for index in range(spec["completions"]):
        said = subprocess.run(
            ["sh", "-c", shown],
            env={**os.environ, "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            check=True,
        )
        *_, part = words = said.stdout.split()
        assert part == f"{index + 1}/{spec['completions']}"
        take(words)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
