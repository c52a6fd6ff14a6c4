"""What has a name is durable: its bytes before it gets the name, and the name before the next."""

import polars as pl
import pytest

from align.stages.storage.disk import fs
from align.stages.storage.run.run_folder import RunFolder
from align.stages.storage.tables import TableFolder
from support import disk_faults
from support.checkpoint_saves import train
from support.made_caches import make_cache


class Syncs:
    """Notes what is synced, and finds names that a power loss could leave without their bytes."""

    def __init__(self):
        self.durable = set()  # files and folders whose content is synced, by inode
        self.unsynced = set()  # folders with a new name
        self.is_new = True  # the name that is given; else the old file or the new one will do
        self.broken = []

    def before(self, op):
        if op.name in ("rename", "link") and not self.is_removal(op):
            self.is_new = not op.target.exists()
            below = op.path.rglob("*") if op.path.is_dir() else ()
            self.broken += [
                f"{path} is {op.target} before it is synced"
                for path in (op.path, *below)
                if path.stat().st_ino not in self.durable
            ]
            self.broken += [f"{op.target} comes before {path} is synced" for path in self.unsynced]

    def after(self, op):
        if op.name in ("fsync", "fsync_folder"):
            self.durable.add(op.path.stat().st_ino)
            self.unsynced.discard(op.path)
        if op.name in ("rename", "link") and not self.is_removal(op) and self.is_new:
            self.unsynced.add(op.target.parent)

    @staticmethod
    def is_removal(op):
        return op.target.name.startswith((".trash-", ".bad-"))


def make_files(base):
    fs.publish(base / "a", b"x")
    fs.put_if_absent(base / "b", b"x")
    with fs.new_file(base / "c", replaces=True) as sink:
        sink.write(b"x")


def make_table(base):
    table = TableFolder(base / "table", "samples")
    table.prepare()
    table.publish(pl.DataFrame({"a": [1]}), made_from={}, settings={}, counts={})


def make_run(base):
    keep = {"keep_last": 1, "best": ""}
    train(RunFolder(base / "run"), lambda *_: None, steps=4, keep=keep)
    fs.publish(RunFolder(base / "run").latest, b"step-00000004\n")
    train(RunFolder(base / "run"), lambda *_: None, keep=keep)


def make_whole_cache(base):
    make_cache(base / "cache")


@pytest.mark.parametrize("work", [make_files, make_table, make_run, make_whole_cache])
def test_no_name_comes_before_its_bytes_or_before_an_earlier_name(tmp_path, work):
    syncs = Syncs()
    with disk_faults.watch(syncs.before, syncs.after):
        work(tmp_path)
    assert syncs.broken == []
    assert syncs.unsynced == set()
    assert syncs.durable
