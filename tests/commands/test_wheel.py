"""What is installed is one package that runs elsewhere, by a Python that `make` finds."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from align import __version__
from support.pages import links, page, programs_under
from support.rooms import ROOMS, ROOT
from support.stub_hub import TOKEN, serving

OUTSIDE = shutil.ignore_patterns(
    ".*", "build", "dist", "demo", "bench-results", "*.egg-info", "__pycache__", "mlruns", "tests"
)
NAME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
FILE_NAME = NAME.replace("-", "_")
SHORT = ("--set", "tracking.mlflow=false", "--set", "train.max_steps=1", "--lr", "1e-3")
PIP = (sys.executable, "-m", "pip")
GITHUB = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "a/b", "GITHUB_SHA": "c0ffee"}
HERE = "https://host/a/b/blob/c0ffee/"  # of the files, in a release by that workflow


def left_out(folder, names):
    """What a checkout holds beside the package lies at its root; `demo` is a room further down."""
    ignored = OUTSIDE if Path(folder) == ROOT else shutil.ignore_patterns("__pycache__")
    return ignored(folder, names)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of a copy, so that nothing is left in the checkout, and the sdist's wheel."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=left_out)
    for left in ("mlflow.db", "notes.md", "demo/align.yaml", "stages/draft.txt"):
        (checkout / left).parent.mkdir(exist_ok=True)
        (checkout / left).touch()
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    steps = {step.get("name"): step.get("run") for step in workflow["jobs"]["build"]["steps"]}
    page = ("bash", "-euc", steps["package page"])
    subprocess.run(page, cwd=checkout, env=os.environ | GITHUB, check=True)
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    program = (sys.executable, "-P", "-c", make)
    subprocess.run(program, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    alone = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    subprocess.run([*PIP, "wheel", *alone, sdist_in(folder)], check=True)
    return folder


def sdist_in(folder):
    return folder / f"{FILE_NAME}-{__version__}.tar.gz"


def package_files():
    """The package's files by their paths in the checkout."""
    rooms = [path for room in ROOMS for path in (ROOT / room).rglob("*")]
    files = [path for path in rooms if path.suffix in {".py", ".j2", ".css", ".yaml"}]
    files += [ROOT / name for name in ("__init__.py", "__main__.py", "cli.py", "py.typed")]
    return {str(path.relative_to(ROOT)): path for path in files}


def test_the_wheel_of_the_sdist_holds_the_package_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist()}
    facts = f"{FILE_NAME}-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in held} == {"align", facts}
    wanted = {f"align/{name}": path.read_bytes() for name, path in package_files().items()}
    assert {name: data for name, data in held.items() if name.startswith("align/")} == wanted
    assert f"{facts}/licenses/LICENSE" in held


def test_the_page_of_the_package_leads_to_files_of_its_commit(built, tmp_path):
    """Where a package index shows it, no file lies beside it."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        about = message_from_bytes(wheel.read(f"{FILE_NAME}-{__version__}.dist-info/METADATA"))
    (tmp_path / "README.md").write_text(about.get_payload(), encoding="utf-8")
    linked = {*links(tmp_path / "README.md")}
    wanted = {one if ":" in one else f"{HERE}{one}" for one in links(ROOT / "README.md")}
    assert linked == wanted
    assert len(linked) > 20
    named = {one.partition(", ")[2] for one in about.get_all("Project-URL")}
    files = {one for one in named if one.startswith(HERE)}
    assert named - files == {"https://host/a/b", "https://host/a/b/issues"}
    assert not [one for one in files if not (ROOT / one.removeprefix(HERE)).is_file()]
    assert f"pip install '{NAME}[" in about.get_payload()


def test_the_sdist_holds_the_package_and_how_to_build_it(built):
    with tarfile.open(sdist_in(built)) as sdist:
        files = [member.name for member in sdist if member.isfile()]
    names = {name.partition("/")[2] for name in files}
    made = {name for name in names if name.startswith(f"{FILE_NAME}.egg-info/")}
    about = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names - made == {*package_files(), *about}


def test_the_installed_wheel_runs_elsewhere(built, tmp_path):
    """Its program and its package come first, as those of a person who installed it."""
    site = tmp_path / "site"
    local = ("--quiet", "--no-deps", "--no-compile", "--no-index", "--find-links", built)
    subprocess.run([*PIP, "install", *local, "--target", site, NAME], check=True)
    path = os.pathsep.join([str(site / "bin"), os.environ["PATH"]])
    subprocess.run(
        [
            "bash",
            "-c",
            "align --version > version && align init && "
            f"{sys.executable} -c 'import align; print(align.__file__)' > where",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site), "PATH": path},
        check=True,
    )
    assert (tmp_path / "version").read_text().strip() == __version__
    assert (tmp_path / "where").read_text().strip() == str(site / "align" / "__init__.py")
    assert (tmp_path / "align.yaml").is_file()


def test_the_script_of_the_hub_begins_empty_and_ends_with_a_private_model(
    built, world, new_store, tmp_path
):
    """On a Hub on loopback, to which large files are sent by LFS; what align needs is here."""
    (script,) = programs_under(page("docs/hub.md"), "All in one script")
    needed = tmp_path / "needed"
    needed.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if FILE_NAME not in installed.name:
            (needed / installed.name).symlink_to(installed)
    with serving() as hub:
        hub.repo("acme/tiny").commit_folder(world.model)
        hub.repo("datasets/acme/prefs").commit({"train.parquet": world.data.paired.read_bytes()})
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        here = {
            **{"PATH": path, "PYTHONPATH": str(needed), "PIP_NO_DEPS": "1"},
            **{"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(built), "ALIGN_HOME": str(tmp_path)},
            "MLFLOW_TRACKING_URI": new_store(tmp_path),
        }
        environment = os.environ | hub.environment(tmp_path / "hub", TOKEN) | here
        program = ["bash", "-euc", script]
        done = subprocess.run(
            program, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    repo = hub.repos["you/tiny-kto"]
    commit = repo.refs["main"]
    assert repo.private
    assert done.stdout.splitlines()[-1].endswith(f"--model hf://you/tiny-kto@{commit}")
    files = repo.commits[commit]
    front = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert (front["base_model"], front["datasets"]) == ("acme/tiny", ["acme/prefs"])
    assert not [name for name in files if str(tmp_path).encode() in files[name]]
    # It imports torch, which the other tests of this file do without.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0


@pytest.mark.parametrize(
    ("script", "data", "page"),
    [
        ("kto.sh", "unpaired", "kto-run/report.html"),
        ("dpo_sweep.sh", "paired", "dpo-sweep/sweep.html"),
    ],
)
def test_an_example_gives_commands_that_run(server, world, tmp_path, script, data, page):
    noted = 'align() { printf \'%q \' "$@"; echo; }; export -f align; bash "$@"'
    words = (ROOT / "examples" / script, world.model, getattr(world.data, data), *SHORT)
    done = subprocess.run(["bash", "-c", noted, "bash", *words], check=True, capture_output=True)
    for given in done.stdout.decode().splitlines():
        server.success(*shlex.split(given), cwd=tmp_path)
    assert (tmp_path / page).is_file()
