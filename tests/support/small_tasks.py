"""Prepares by many small tasks; a process of its own can be started at it and killed."""

import os
import random

from align.pipeline.executor import Inline
from align.pipeline.precompute_plan import make_plan, open_job
from align.stages.tracking.progress import NoProgress
from support.random_data import small_sizes
from support.stub_reference import StubReference


def prepare_by_small_tasks(config, sizes):
    """Prepares in this process, which may be one of several that share the folder."""
    os.environ["ALIGN_FAILPOINTS"] = ""
    for module, name, size in small_sizes(random.Random(sizes)):
        setattr(module, name, size)
    job = open_job(config, StubReference())
    job.folder.prepare()
    job.work.prepare()
    make_plan(job, f"{os.getpid()}", Inline(), NoProgress())
