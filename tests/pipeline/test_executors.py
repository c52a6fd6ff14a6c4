"""The executors of one machine keep to what stage 1 relies on."""

from align.pipeline.executors import processes
from align.pipeline.executors.processes import Children, Inline
from align.pipeline.parts import WHOLE, Part
from align.pipeline.precompute import prepare
from align.pipeline.precompute.opening import open_job
from align.stages.tracking.progress import NoProgress
from support.executor_contract import (
    COUNT,
    OTHERS,
    FileTasks,
    made_by,
    require_executor_contract,
    require_runner_contract,
)
from support.stub_reference import StubReference


def test_they_keep_to_the_contract(tmp_path):
    require_executor_contract(Inline(), tmp_path / "inline", survives=False)
    require_runner_contract(Children(WHOLE, 2), tmp_path / "children")


def test_what_another_process_commits_meanwhile_is_not_made(tmp_path):
    tasks = FileTasks(tmp_path, also=OTHERS)
    assert made_by(Inline(), tasks) == [task for task in range(COUNT) if task != OTHERS]


def test_stage_1_prepares_rows_as_its_executor_says(config, monkeypatch):
    job, asked = open_job(config, StubReference()), []
    job.folder.prepare()
    job.work.prepare()

    class Asked(Inline):
        def for_preparing(self, **how):
            asked.append(how)
            return Inline()

    for least in (1 << 23, 0):
        monkeypatch.setattr(prepare, "SMALL_INPUT_BYTES", least)
        prepare.encode(job, prepare.EncodeTasks.of(job), Asked(), NoProgress())
    assert asked == [{"is_small": True, "workers": 0}, {"is_small": False, "workers": 0}]


def test_parts_make_every_task_once_between_them(tmp_path):
    tasks = FileTasks(tmp_path)
    shares = [made_by(Inline(Part(number, 3)), tasks) for number in (1, 2, 3)]
    assert sorted(task for made in shares for task in made) == [*range(COUNT)]
    assert all(shares)


def test_rows_are_prepared_by_the_cores_that_a_rank_may_use(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 16)
    whole, part = Inline(), Inline(Part(2, 3))
    ranks = (("NOBODY", "4", 16), ("LOCAL_WORLD_SIZE", "8", 2), ("LOCAL_SIZE", "32", 1))
    for name, here, cores in ranks:
        with monkeypatch.context() as patch:
            patch.setenv(name, here)
            assert part.for_preparing(is_small=False, workers=0) == Children(part.share, cores)
    assert whole.for_preparing(is_small=True, workers=0) == whole
    assert whole.for_preparing(is_small=True, workers=3) == Children(WHOLE, 3)
