"""What is installed is one package that runs elsewhere, by a Python that `make` finds."""

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
SHORT = ("--set", "tracking.mlflow=false", "--set", "train.max_steps=1", "--lr", "1e-3")
PIP = (sys.executable, "-m", "pip")


def left_out(folder, names):
    """What a checkout holds beside the package lies at its root; `demo` is a room further down."""
    ignored = OUTSIDE if Path(folder) == ROOT else shutil.ignore_patterns("__pycache__")
    return ignored(folder, names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "checkout", ignore=left_out)
    alone = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    subprocess.run([*PIP, "wheel", *alone, folder / "checkout"], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = {*zipfile.ZipFile(wheel).namelist()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    facts = f"{project['name'].replace('-', '_')}-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"align", facts}
    rooms = [path for room in ROOMS for path in (ROOT / room).rglob("*")]
    files = [path for path in rooms if path.suffix in {".py", ".j2", ".css", ".yaml"}]
    files += [ROOT / name for name in ("__init__.py", "__main__.py", "cli.py", "py.typed")]
    wanted = {f"align/{path.relative_to(ROOT)}" for path in files}
    assert {name for name in names if name.startswith("align/")} == wanted
    assert f"{facts}/licenses/LICENSE" in names


def test_the_installed_wheel_runs_elsewhere(wheel, tmp_path):
    """Its program and its package come first, as those of a person who installed it."""
    site, alone = tmp_path / "site", ("--quiet", "--no-deps", "--no-compile")
    subprocess.run([*PIP, "install", *alone, "--target", site, wheel], check=True)
    path = os.pathsep.join([str(site / "bin"), os.environ["PATH"]])
    subprocess.run(
        [
            "bash",
            "-c",
            f"align init && {sys.executable} -c 'import align; print(align.__file__)' > where",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site), "PATH": path},
        check=True,
    )
    assert (tmp_path / "where").read_text().strip() == str(site / "align" / "__init__.py")
    assert (tmp_path / "align.yaml").is_file()


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
