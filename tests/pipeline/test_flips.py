"""A bit that flips on the disk while stage 1 is at work, or between two runs, is found."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from align.schemas.errors import AlignError
from align.stages.storage.cache_folder import CacheFolder
from support.flips import flips
from support.patience import PATIENCE
from support.stage_one import child, contents, run


@pytest.fixture
def stopped(config, tmp_path):
    """A run that was killed after two of its commits, and what it ends in undisturbed."""
    run(replace(config, cache=replace(config.cache, output=str(tmp_path / "clean"))))
    child(config, "commit.done=kill@2").join(PATIENCE)
    (work,) = CacheFolder(Path(config.cache.output)).works()
    return work


@pytest.mark.parametrize("kind", ["spool", "commits", "plan.json"])
@pytest.mark.parametrize("count", [8, pytest.param(320, marks=pytest.mark.long)])
def test_no_flipped_bit_reaches_a_cache(stopped, config, tmp_path, kind, count):
    clean = contents(tmp_path / "clean")
    sizes = {path: path.stat().st_size for path in files_below(stopped.root / kind)}
    found = 0
    for number, (path, byte, bit) in enumerate(flips(sizes, count)):
        output = tmp_path / f"cache-{number}"
        shutil.copytree(config.cache.output, output)
        flip(output / path.relative_to(config.cache.output), byte, bit)
        again = replace(config, cache=replace(config.cache, output=str(output)))
        try:
            run(again)
        except AlignError as error:
            found += 1
            mend(error, output)
            run(again)
        assert contents(output) == clean
        shutil.rmtree(output)
    print(f"{found} of {count} flips in {kind} were found, the others changed nothing")
    assert found > count // 2


def mend(error, output):
    """Does what the message says: a damaged file of ours is named, to be removed."""
    assert error.exit_code in (4, 5), error  # 4: a flipped format version asks for another align
    (name,) = re.findall(r"^(/\S+) (?:is damaged|has format version)", str(error))
    assert Path(name).is_relative_to(output / "_align")
    Path(name).unlink()


def flip(path, byte, bit):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def files_below(path):
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
