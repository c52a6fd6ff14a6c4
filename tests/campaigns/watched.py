"""What a process does beside reading: files written elsewhere, programs started, pickles opened."""

import os
import shutil
import sys
from pathlib import Path

STARTING = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
CHANGING = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Undamaged:
    """What a campaign of folders makes once in a process, and what comes of it by name."""

    @classmethod
    def begin(cls, folder):
        """Empty folders, and a process that remembers nothing of others."""
        for name in ("bases", "case"):
            shutil.rmtree(folder / name, ignore_errors=True)
        os.environ["ALIGN_HOME"] = str(folder / "home")
        cls.folder, cls.bases, cls.whole = folder, folder / "bases", {}
        cls.bases.mkdir(parents=True)
        cls.watch = Watch(folder)


class Watch:
    """Within it, what was done outside of a folder is kept in `seen`."""

    def __init__(self, folder):
        self._inside = str(Path(folder).resolve())
        self._is_on = False
        self.seen = []
        sys.addaudithook(self._hear)

    def __enter__(self):
        self.seen = []
        self._is_on = True

    def __exit__(self, *_):
        self._is_on = False

    def _hear(self, event, arguments):
        if not self._is_on:
            return
        if event in STARTING:
            self.seen.append(f"{event} {arguments!r:.100}")
        elif (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        ) or event in CHANGING:
            self._require_inside(event, arguments[0])

    def _require_inside(self, event, path):
        # A name below an open folder is that folder's affair.
        if isinstance(path, str | bytes) and Path(os.fsdecode(path)).is_absolute():
            name = os.path.realpath(os.fsdecode(path))
            if not name.startswith((self._inside, "/dev/", "/proc/")):
                self.seen.append(f"{event} {name}")
