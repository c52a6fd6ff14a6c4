"""The executors of one machine, and one of a few lines, keep to what stage 1 relies on."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from align.pipeline.executors import processes
from align.pipeline.executors.executor import WHOLE, Share
from align.pipeline.executors.processes import Children, Inline
from support.executor_contract import COUNT, FileTasks, made_by, require_executor_contract


@dataclass(frozen=True)
class Threads:
    """An executor of a few lines."""

    groups: int = 4

    def for_preparing(self, *, is_small, workers):
        return self

    def run(self, tasks, *, progress, on_done):
        todo = [task for task in WHOLE.of(tasks) if not tasks.is_committed(task)]
        with ThreadPoolExecutor(2) as pool:
            for facts in pool.map(tasks.open(progress), todo):
                on_done(facts)


@pytest.mark.parametrize(
    ("executor", "survives"), [(Inline(), False), (Children(WHOLE, 2), True), (Threads(), False)]
)
def test_it_keeps_to_the_contract(executor, survives, tmp_path):
    require_executor_contract(executor, tmp_path / "tasks", survives=survives)


def test_parts_make_every_task_once_between_them(tmp_path):
    tasks = FileTasks(tmp_path)
    shares = [made_by(Inline(Share(number, 3)), tasks) for number in (1, 2, 3)]
    assert sorted(task for made in shares for task in made) == [*range(COUNT)]
    assert all(shares)


def test_rows_are_prepared_by_the_cores_that_a_rank_may_use(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 16)
    whole, part = Inline(), Inline(Share(2, 3))
    ranks = (("NOBODY", "4", 16), ("LOCAL_WORLD_SIZE", "8", 2), ("LOCAL_SIZE", "32", 1))
    for name, here, cores in ranks:
        with monkeypatch.context() as patch:
            patch.setenv(name, here)
            assert part.for_preparing(is_small=False, workers=0) == Children(part.share, cores)
    assert whole.for_preparing(is_small=True, workers=0) == whole
    assert whole.for_preparing(is_small=True, workers=3) == Children(WHOLE, 3)
