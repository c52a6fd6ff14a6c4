"""What is installed is one package, and it runs where nothing of the checkout is seen."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from align import __version__
from support.rooms import ROOMS, ROOT

OUTSIDE = shutil.ignore_patterns(
    ".*", "build", "dist", "demo", "bench-results", "*.egg-info", "__pycache__", "mlruns", "tests"
)


def left_out(folder, names):
    """What a checkout holds beside the package lies at its root; `demo` is a room further down."""
    ignored = OUTSIDE if Path(folder) == ROOT else shutil.ignore_patterns("__pycache__")
    return ignored(folder, names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "checkout", ignore=left_out)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, folder / "checkout"], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    distribution = project["project"]["name"].replace("-", "_")
    assert tops == {"align", f"{distribution}-{__version__}.dist-info"}
    assert distribution != "align"  # another project has it
    wanted = {
        f"align/{path.relative_to(ROOT)}"
        for room in ROOMS
        for pattern in ("*.py", "*.j2")
        for path in (ROOT / room).rglob(pattern)
    }
    root_files = {"align/__init__.py", "align/__main__.py", "align/cli.py", "align/py.typed"}
    assert {name for name in names if name.startswith("align/")} == wanted | root_files
    assert f"{distribution}-{__version__}.dist-info/licenses/LICENSE" in names
    packages = project["tool"]["setuptools"]["packages"]
    assert {f"{name.replace('.', '/')}/__init__.py" for name in packages} <= set(names)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """That of a person who installed the wheel: its program and its package come first."""
    target = tmp_path_factory.mktemp("site") / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, wheel], check=True)
    path = os.pathsep.join([str(target / "bin"), os.environ["PATH"]])
    return os.environ | {"PYTHONPATH": str(target), "PATH": path}


def test_the_installed_wheel_runs_elsewhere(installed, tmp_path):
    where = [sys.executable, "-c", "import align; print(align.__file__)"]
    told = {"cwd": tmp_path, "env": installed, "capture_output": True, "text": True}
    found = subprocess.run(where, check=True, **told).stdout.strip()
    assert Path(found) == Path(installed["PYTHONPATH"]) / "align" / "__init__.py"
    answer = subprocess.run([sys.executable, "-m", "align", "--help"], check=True, **told)
    assert "precompute-ref" in answer.stdout
    assert answer.stderr == ""
    subprocess.run(["bash", "-c", "align init"], check=True, **told)
    assert (tmp_path / "align.yaml").is_file()


SHORT = ("--set", "tracking.mlflow=false", "--set", "train.max_steps=2", "--lr", "1e-3")


def example(name, *arguments):
    return ["bash", *map(str, (ROOT / "examples" / name, *arguments, *SHORT))]


def test_an_example_runs_on_the_installed_wheel(installed, world, tmp_path):
    told = {"cwd": tmp_path, "env": installed, "capture_output": True, "text": True}
    words = example("kto.sh", world.model, world.data.unpaired)
    done = subprocess.run(words, check=False, **told)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kto-run" / "report.html").is_file()


def test_an_example_of_a_sweep_runs(server, world, tmp_path):
    """The commands that its script gives, by processes that need not import anything."""
    noted = 'align() { printf \'%q \' "$@"; echo; }; export -f align; exec "$@"'
    words = example("dpo_sweep.sh", world.model, world.data.paired)
    done = subprocess.run(
        ["bash", "-c", noted, *words[:1], *words], check=True, capture_output=True
    )
    for given in done.stdout.decode().splitlines():
        answer = server.run(*shlex.split(given), cwd=tmp_path)
        assert answer.code == 0, (given, answer)
    assert (tmp_path / "dpo-sweep" / "sweep.html").is_file()
