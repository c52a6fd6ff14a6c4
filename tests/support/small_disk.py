"""Runs stage 1 on a disk that is first too small, then filled on the way, then has room.

Needs to be root of its own mount namespace; prints one JSON object.
"""

import json
import subprocess
import sys
from pathlib import Path

from align.schemas.config import Config
from align.schemas.errors import StorageError, UsageError
from align.schemas.json_codec import from_json
from align.stages.storage import failpoints
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from support.stage_one import contents, run

UNITS_BEFORE_IT_IS_FULL = 2


def main():
    """Tells what each attempt was refused with, and what was made in the end."""
    config, disk = from_json(Config, sys.argv[1]), Path(sys.argv[2])
    folder = CacheFolder(Path(config.cache.output))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], check=True)
    too_small = []
    with failpoints.watch(Ballast(disk / "ballast").after_some_units):
        for kilobytes in range(32, 2048, 8):
            resize = f"remount,size={kilobytes}k"
            subprocess.run(["mount", "-o", resize, disk], check=True)
            too_small.append(refusal(config))
            if (disk / "ballast").exists():
                break
    committed = len(list(folder.works()[0].commits.glob("*.json")))
    require_unfinished(folder)
    (disk / "ballast").unlink()
    run(config)
    told = {
        "too small": too_small[:-1],
        "filled": too_small[-1],
        "committed when filled": committed,
        "contents": contents(folder.root),
    }
    print(json.dumps(told))


class Ballast:
    """A file that takes all the room there is once some units are committed."""

    def __init__(self, path):
        self.path = path
        self.links = 0

    def after_some_units(self, op):
        """Watches the disk."""
        if op.name == "create" and op.path.suffix == ".parquet" and not self.path.exists():
            commits = op.path.parents[2] / "commits"
            if len(list(commits.glob("*.json"))) == UNITS_BEFORE_IT_IS_FULL:
                with self.path.open("wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(bytes(1024))
                    except OSError:
                        pass


def refusal(config):
    """The message with which a run is refused."""
    try:
        run(config)
    except StorageError as error:
        return str(error)
    raise AssertionError("there should be no room")


def require_unfinished(folder):
    """Nobody may take it for whole."""
    try:
        load_manifest(folder)
    except UsageError:
        return
    raise AssertionError("half a cache was taken for whole")


main()
