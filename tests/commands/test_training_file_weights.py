"""A training on files of which one counts more: the same after a kill, and planned as it runs."""

import pyarrow.parquet as pq
import pytest

from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.command import align
from support.refusals import require_names
from support.trainings import KILLED, refused, require_same

WEIGHTS = ("--set", "train.file_weights={first: 2, second.parquet: 0.5}")
RESUME = ("--resume", "auto")


@pytest.fixture(scope="module")
def cache(course, world, tmp_path_factory):
    """Of two files of thirty rows."""
    folder = tmp_path_factory.mktemp("two-files")
    rows = pq.read_table(world.data.paired)
    assert len(rows) == 60
    files = [folder / "first.parquet", folder / "second.parquet"]
    for path, start in zip(files, (0, 30), strict=True):
        pq.write_table(rows.slice(start, 30), path)
    made = ("--model", course.model, "--output", folder / "cache", "--shards", 8)
    course.server.success("precompute-ref", *files, *made, "--no-mlflow")
    return folder / "cache"


def test_a_killed_run_resumes_with_the_same_draws(course, cache, tmp_path):
    words = ("--cache", cache, *WEIGHTS, "--batch-size", 16, "--max-steps", 0, "--epochs", 2)
    measured = ("--eval-fraction", 0, "--eval-every", 0, "--set", "train.limit_eval_batches=1")
    words = (*words, *measured, "--set", f"train.eval_cache={course.cache}")  # of another file
    whole, run = tmp_path / "whole", tmp_path / "run"
    said = course.run(whole, *words).err
    require_names(said, "first.parquet: 60 draws", "second.parquet: 15 draws")
    assert read_ending(RunFolder(whole)).total_steps == 10  # 75 rows are five steps
    planned = align("plan", *map(str, (*words, "--method", "kto"))).out
    assert "10 steps" in planned
    course.ends(KILLED, run, *words, fault="before:update=kill@8")
    other = ("--set", "train.file_weights={first: 2}")
    refused(course, 4, run, *words, *other, *RESUME, names=("train.file_weights: ",))
    course.run(run, *words, *RESUME)
    require_same(run, whole)
