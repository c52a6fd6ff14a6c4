"""Which tests are slow by what their file names.

It starts a process, trains, or asks MLflow, which starts git. Others that take seconds say so.
"""

import inspect
import re
from functools import cache

WORDS = re.compile(
    r"\b(fork|multiprocessing|subprocess|launch|child|Gate|CHILDREN"  # processes
    r"|joined_world|one_rank|open_engine|open_session|run_training|train|sweep|workers"
    r"|begun|open_store|open_training_run|recorded"  # MLflow
    r"|server|course|training_world|object_server|bucket|journey|mlflow_server)\b"  # fixtures
)


@cache
def is_slow(module):
    """Whether a file of tests names one of these."""
    return bool(WORDS.search(inspect.getsource(module)))
