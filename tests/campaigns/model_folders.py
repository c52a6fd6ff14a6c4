"""Damages model folders, and compares the log-probs that both stages read with the whole one's.

A case ends well if the numbers are those of the whole folder, or others where the damage is a
setting that makes another model; or if one message names the file. Each is read in a child.
"""

import contextlib
import shutil
import sys
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import runner  # noqa: E402
from campaigns.cases import Campaign, End, judged_message  # noqa: E402

from support.damaged_models import damage, file_of  # noqa: E402
from support.model_doors import CHECKS, Reader, make_bases, without_check  # noqa: E402

ENDS = {"other": "changed", "no file named": "unnamed", "abort": "crash"}
ENDS |= {"not finite": "wrong", "wrong in silence": "wrong"}


class Folders:
    """The undamaged folders, and what reads the damaged ones."""

    def __init__(self, folder):
        self.bases = make_bases(folder / "bases")
        self.reader = Reader(self.bases)

    @classmethod
    def prepare(cls, folder):
        """Made once in a process."""
        shutil.rmtree(folder / "bases", ignore_errors=True)
        cls.made = cls(folder)


def case(seed, folder):
    """Reads a damaged folder as one of the two stages does."""
    damaged = folder / "case"
    if damaged.exists():
        shutil.rmtree(damaged)
    done = damage(Folders.made.bases, damaged, seed)
    found = Folders.made.reader.outcome(
        done.base, damaged, trains=bool(seed % 2), is_meant=done.is_meant
    )
    end = End(ENDS.get(found.kind, found.kind))
    if found.kind == "refused":
        end = judged_message(found.said, ())
    detail = f"{done.base}: {done.what}: {found.said}"[:600]
    return End(end.outcome, detail, round(found.seconds, 3), found.megabytes)


def leave_out(check):
    """Reads folders without one of the checks until the process ends."""
    LEFT_OUT.enter_context(without_check(check))


LEFT_OUT = contextlib.ExitStack()
PLANTS = {check: partial(leave_out, check) for check in CHECKS}
CAMPAIGN = Campaign(__file__, file_of, case, Folders.prepare, PLANTS)

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
