"""What the README and the pages of docs/ say is so."""

import ast
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
from align.schemas.cache import FORMAT_VERSION, Manifest
from align.schemas.config import Config
from align.schemas.errors import AlignError
from align.schemas.rows import REASONS
from align.stages.methods.method_docs import describe, markdown_table
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS, recipe_of
from align.stages.storage.shards import shard_schema
from support.command import align
from support.pages import PAGES, ROOT, anchors, blocks, codes, commands, links, name_of, page
from support.rooms import ROOMS

README = page("README.md").read_text(encoding="utf-8")
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
# What the page says to pass with a file whose columns have names of their own.
RENAMED = ("prompt=question", "chosen=good answer", "rejected=bad answer")
MAPPED = [word for each in RENAMED for word in ("--map", each)]
GIVEN = [(path, words) for path in PAGES for words in commands(path)]


@pytest.mark.parametrize(
    ("path", "words"), GIVEN, ids=[f"{name_of(path)}: {' '.join(words)}" for path, words in GIVEN]
)
def test_every_command_is_one_that_the_command_line_takes(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    take(words)


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


def test_commands_are_found_wherever_they_are():
    """The tests above would pass for nothing if none were."""
    named = {name_of(path) for path, _ in GIVEN}
    assert {"README.md", "docs/getting-started.md", "docs/caches.md"} <= named
    assert {words[0] for _, words in GIVEN} >= {"precompute-ref", "train", "sweep", "score", "gc"}
    assert len(GIVEN) > 30


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_flags_and_settings_in_the_text_exist(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in codes(path):
        if path == MOVING and not code.column:
            continue
        words = shlex.split(code.text) if code.text.startswith("align ") else code.text.split()
        if words[0] == "align" and len(words) > 2 and not re.search("[A-Z…]", code.text):
            take(words[1:])
        elif words[0] == "align":
            assert words[1:2] == [] or words[1] in COMMANDS or words[1] == "--help", code.text
        else:
            for match in filter(None, map(SETTING.fullmatch, words)):
                assert is_setting(match["section"], match["name"]), code.text
        if words[0].startswith("--"):
            flags = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
            assert flags <= FLAGS | FOREIGN, code.text
        if (
            words[0] in {"--set", "--method"}
            and len(words) > 1
            and not re.search("[A-Z…]", code.text)
        ):
            assert any(is_taken([name, *words]) for name in TAKERS), code.text


def is_taken(words):
    """Whether a command takes what is given to it."""
    try:
        take(words)
    except AlignError:
        return False
    return True


def is_setting(section, name):
    """Whether there is such a setting; an option of a mixture has its method's name before it."""
    if section == "method":
        return name == "NAME" or name.rpartition(".")[2] in METHOD_OPTIONS
    return f"{section}.{name}" in SETTINGS


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_link_is_dead(path):
    for target in links(path):
        if re.match("https?:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_file_and_folder_of_the_tree_that_is_named_exists(path):
    for code in codes(path):
        if PLACE.fullmatch(code.text) and code.text not in TO_BE_WRITTEN:
            assert page(code.text).exists(), code.text


def test_every_page_is_in_the_index():
    listed = set(links(page("docs/index.md")))
    assert listed == {path.name for path in page("docs").glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name):
    assert f"| `align {name}" in README


def test_the_readme_counts_the_methods():
    assert f"**{len(METHODS)} methods on one cache**" in README


def test_every_exit_code_is_on_its_page():
    told = page("docs/errors.md").read_text(encoding="utf-8")
    errors = ast.parse((ROOT / "schemas" / "errors.py").read_text())
    codes = {
        node.value.value
        for node in ast.walk(errors)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "exit_code"
        if isinstance(node.value, ast.Constant)
    }
    assert {2, 3, 4, 5, 6, 74, 75} <= codes
    for code in codes:
        assert f"| {code} |" in told
    assert "129, 130, 138, 143" in told


def named_on(name):
    return {code.text for code in codes(page(name))}


def test_every_reason_to_reject_a_row_is_on_the_page_of_formats():
    assert {*REASONS} <= named_on("docs/data-formats.md")


def test_every_column_and_field_of_a_cache_is_on_its_page():
    columns = shard_schema(token_logps=True, carried=()).names
    assert {*columns, *Manifest.__dataclass_fields__} <= named_on("docs/cache-format.md")
    assert f"| {FORMAT_VERSION}; another" in page("docs/cache-format.md").read_text("utf-8")


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
    told = MAPPED if path.stem == "renamed" else []
    output = ("--model", world.model, "--output", tmp_path / "cache", "--no-mlflow")
    answer = align("precompute-ref", path, *output, *told)
    assert answer.code == 0, answer
    summary = json.loads(align("inspect", tmp_path / "cache", "--json").out)
    kind, *_ = path.stem.split("-")
    roles = {"unpaired": {"desirable", "undesirable"}, "scored": {"candidate"}}
    expected = roles.get(kind, {"chosen", "rejected"}) | {"mismatched"}
    assert set(summary["roles"]) == expected
    assert not (tmp_path / "cache" / "quarantine").exists()


def test_the_names_that_an_example_is_given_are_those_on_its_page():
    (words,) = commands(page("docs/data-formats.md"))
    assert words == ["precompute-ref", "renamed.csv", *MAPPED]


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


@pytest.mark.slow
def test_the_demo_runs(server, tmp_path):
    """On fewer rows than `make demo` takes."""
    make = ("make", "--no-print-directory", "--dry-run", "--always-make", "demo", "PYTHON=python")
    steps = run(*make, cwd=ROOT).partition("rm -rf demo")[2].splitlines()[1:]
    small = [step.replace("demo/world", "demo/world --rows 60", 1) for step in steps[:1]]
    (tmp_path / "demo").mkdir()
    follow(server, [*small, *steps[1:]], tmp_path)
    for method in ("kto", "dpo", "orpo"):
        assert (tmp_path / "demo" / "align-sweep" / method / "model" / "config.json").is_file()


def test_getting_started_ends_where_it_says(server, tmp_path):
    steps = [
        line for block in blocks(page("docs/getting-started.md"), "sh") for line in block.lines
    ]
    follow(server, steps, tmp_path)
    for name in ("align-run/model/config.json", "align-run/report.html", "align-sweep/sweep.html"):
        assert (tmp_path / name).is_file()
    snippets = blocks(page("docs/getting-started.md"), "python")
    snippets += blocks(page("docs/cache-format.md"), "python")
    code = "\n".join(block.text for block in snippets)
    told = run(sys.executable, "-c", code, cwd=tmp_path)
    assert "Question" in told
    assert "200 ['row_id', 'source'" in told


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

    def told(*arguments):
        program = (sys.executable, "-m", "align")
        return run(*program, *arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))

    assert "(b D - t)^2" in told("methods", "square")
    assert "margin of rewards that is wanted [a number above 0]" in told("methods", "square")
    trained = ("--cache", training_world.pairs, "--max-steps", 2, "--batch-size", 4, "--no-mlflow")
    assert "2 steps done" in told("train", "--method", "square", *trained)


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
