"""Memory that runs out in a step: the same result in smaller micro-batches, or what to do."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from align.schemas.errors import MemoryLimitError
from align.stages.methods.objective import Objective
from align.stages.model.library_errors import is_out_of_memory
from align.stages.model.logprobs import causal_model
from align.stages.train.memory import MemoryBackoff, MicroBatchTooLarge, catching_out_of_memory
from support.refusals import require_names
from support.training_world import Recorded, facts, job_of, session_of, through

ROOM = 440  # tokens: of the rows of the first step, which are 861, half fits
LEARNING = {"max_steps": 2, "warmup": 0.0, "schedule": "constant", "eval_fraction": 0.2}
WORDS = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"


@pytest.fixture
def session_with(training_world, one_rank):
    """A session whose micro-batches are as large as its steps, unless set otherwise."""

    def opened(method="dpo", **settings):
        how = {**LEARNING, "tokens_per_batch": 100_000, **settings}
        session = session_of(job_of(training_world.pairs, method, **how), one_rank)
        for module in session.policy.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1  # drawn anew for each micro-batch
        return session

    return opened


@contextmanager
def scarce(session, where, *, most=ROOM):
    """Lets memory run out in the second layer where a micro-batch has more tokens than `most`."""
    layer = causal_model(session.policy.model).model.layers[1]

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def watch(_, inputs):
        states = inputs[0]
        if states.shape[0] * states.shape[1] <= most:
            return
        if torch.is_grad_enabled() == (where == "without gradients"):
            return
        if where != "backward":
            raise RuntimeError(WORDS)
        states.register_hook(refuse)

    hook = layer.register_forward_pre_hook(watch)
    try:
        yield
    finally:
        hook.remove()


def learned(session, where=""):
    with scarce(session, where, most=ROOM if where else 10**6):
        recorded, place, _ = through(session)
    return session.engine.weights(), recorded, place


# Of kto a step runs without gradients first; the state of bco is that of one step, however often it
# was begun. So is an evaluation, with which a run begins.
@pytest.mark.parametrize(
    ("method", "where", "preset", "dtype"),
    [
        ("dpo", "forward", "zero0", "float32"),
        ("dpo", "backward", "zero3", "bfloat16"),
        ("bco", "backward", "zero1", "bfloat16"),
        ("kto", "without gradients", "zero2-offload", "float32"),
    ],
)
def test_a_step_is_repeated_as_if_it_had_been_planned_so(
    session_with, method, where, preset, dtype
):
    settings = {"deepspeed": preset, "dtype": dtype}
    found, recorded, place = learned(session_with(method, **settings), where)
    steps, budgets = zip(*recorded.shrunk, strict=True)
    assert set(steps) == {0}
    assert list(budgets) == sorted(set(budgets), reverse=True)
    fits = budgets[-1]
    expected, same, then = learned(session_with(method, tokens_per_batch=fits, **settings))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert place.methods == then.methods
    # The evaluation before the first step may have fitted as it was planned.
    found = [*recorded.steps, *recorded.evaluations[1:]]
    wanted = [*same.steps, *same.evaluations[1:]]
    assert [facts(one) for _, one in found] == [facts(one) for _, one in wanted]
    for (_, one), (_, other) in zip(recorded.steps, same.steps, strict=True):
        # The tokens and padding of what was run in the end; and how often that was not the first.
        assert (one["tokens"], one["padding"]) == (other["tokens"], other["padding"])
        assert one["memory/ran_out"] == len(budgets)
        assert "memory/ran_out" not in other


@pytest.mark.parametrize(
    ("method", "part"), [("dpo", "outcome"), ("bco", "pre_pass"), ("kto", "ratios")]
)
def test_a_loss_that_does_not_fit_is_computed_of_fewer_rows(
    session_with, monkeypatch, method, part
):
    """A run begins with an evaluation, so memory runs out there first."""
    session = session_with(method)
    compute = getattr(Objective, part)

    def scarcely(objective, completions, *others):
        if len(completions.logps) > 4:
            raise RuntimeError(WORDS)
        return compute(objective, completions, *others)

    monkeypatch.setattr(Objective, part, scarcely)
    recorded, place, _ = through(session)
    assert recorded.shrunk[0][0] == 0
    assert place.step == len(recorded.steps) > 0


def refused(session, where="", *, most=ROOM, ranks=1):
    """What is said as the run ends, and what was noted before."""
    recorded, memory = Recorded(), session.memory
    memory.ranks = ranks
    with scarce(session, where, most=most), pytest.raises(MemoryLimitError) as raised:
        through(session, recorded=recorded)
    return str(raised.value), recorded.shrunk


def test_what_cannot_be_repeated_ends_the_run_with_what_takes_less(session_with, monkeypatch):
    said, _ = refused(session_with(tokens_per_batch=1), "forward", most=20)
    require_names(said, "align plan")
    # Of several ranks one says how to start again.
    said, ((step, tokens),) = refused(session_with(), "backward", ranks=2)
    assert step == 0
    assert f"--tokens-per-batch {tokens}" in said

    def refuse():
        raise torch.OutOfMemoryError("CUDA out of memory")

    session = session_with()
    monkeypatch.setattr(session.engine, "step", refuse)
    _, shrunk = refused(session, most=10**6)
    assert not shrunk


def test_what_torch_says_where_no_memory_is_left_asks_for_less_and_no_other_error_does():
    for words, is_one in {
        WORDS: True,
        "CUDA error: out of memory": True,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate": True,
        "CUDA error: device-side assert triggered": False,
        "size mismatch": False,
    }.items():
        assert is_out_of_memory(RuntimeError(words)) == is_one
        with (
            pytest.raises(MicroBatchTooLarge if is_one else RuntimeError),
            catching_out_of_memory(None),
        ):
            raise RuntimeError(words)


def test_half_of_what_did_not_fit_is_allowed():
    trees = tuple(SimpleNamespace(num_tokens=tokens) for tokens in (30, 50, 20))
    packed, padded = MemoryBackoff(pads=False), MemoryBackoff(pads=True)
    for room in (packed, padded):
        room.shrink(SimpleNamespace(trees=trees))
    assert (packed.budget, padded.budget) == (50, 75)  # (30 + 50 + 20) / 2 and 3 x 50 / 2
