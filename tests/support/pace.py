"""Which tests are slow by what their file names.

It starts a process, trains, or asks MLflow, which starts git. Others that take seconds say so.
"""

import inspect
import re
from functools import cache

DOORS = re.compile(
    r"\b(fork|run_ranks|joined_world|open_engine|session_of|train_in)\("
    r"|\b(begun|open_store|open_training_run|recorded)\("  # MLflow
    r"|import .*\b(multiprocessing|subprocess|launch|child|Gate)\b"
    # Fixtures:
    r"|\b(server|course|journey|training_world|devices|one_rank|bucket|object_server|uri)[,)]"
    r'|"(train|sweep)",|\bworkers='  # of a command, or a setting
)


@cache
def is_slow(module):
    """Whether a file of tests goes through one of these."""
    return bool(DOORS.search(inspect.getsource(module)))
