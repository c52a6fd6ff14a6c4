"""How often the host waits for a GPU in a whole step, as CUDA tells it: `make test-gpu`."""

import pytest

from align.stages.train.step import train_step
from support.training_world import START, job_of, session_of
from support.waits import waits_for_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]
# It reads the norm of the gradients, which DeepSpeed computes, and leaves on the device.
NORM = "stages/engine/deepspeed_engine.py"


@pytest.mark.parametrize(
    ("preset", "dtype"), [("zero0", "float32"), ("zero1", "bfloat16"), ("zero2", "bfloat16")]
)
@pytest.mark.parametrize("method", ["kto", "dpo", "orpo"])
def test_a_step_of_ours_waits_once(training_world, one_rank, device, method, preset, dtype):
    how = {"deepspeed": preset, "dtype": dtype, "tokens_per_batch": 350}
    session = session_of(job_of(training_world.pairs, method, device=device, **how), one_rank)
    with session.feed.steps(START.cursor) as steps:
        batch = next(iter(steps))
    assert len(batch.own) >= 2
    for _ in range(2):  # what is compiled or allocated once is no part of a step
        train_step(session.engine, session.recipe, batch, state={}, seed=(0, 0))
    with waits_for_gpu() as waits:
        train_step(session.engine, session.recipe, batch, state={}, seed=(0, 0))
    seen = waits.taken()
    for place, count in sorted(seen.items()):
        print(f"{method} {preset} {dtype} {session.policy.path.layout}: {count} x {place}")
    own = {place: count for place, count in seen.items() if place.startswith("stages/")}
    assert sum(count for place, count in own.items() if place.startswith(NORM)) <= 1
    others = {place: count for place, count in own.items() if not place.startswith(NORM)}
    assert sum(others.values()) == (0 if device == "cpu" else 1), others
    assert all(place.startswith("stages/train/step.py") for place in others)
