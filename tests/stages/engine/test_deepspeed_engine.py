"""One launch per world size runs every way to train; the tests look at what its ranks saw."""

import math
from dataclasses import replace

import pytest
import torch

from support import engine_ranks
from support.engine_ranks import OPTIONS, STEPS, WEIGHTS, WIDTH, Run, global_tokens, rows_of
from support.rounding import STEP
from support.tiny_policy import VOCABULARY, TinyPolicy

pytestmark = pytest.mark.numeric
WAYS = [
    f"{preset}/{dtype}"
    for preset in ("zero0", "zero1", "zero2", "zero3", "zero3-offload")
    for dtype in ("float32", "bfloat16")
]
FLOAT32 = [way for way in WAYS if way.endswith("float32")]


@pytest.fixture(scope="session", params=[1, 2], ids=["one rank", "two ranks"])
def seen(request, launched):
    return launched(request.param, *WAYS)


@pytest.fixture(scope="session", params=[3, 4])
def seen_by_many(request, launched):
    return launched(request.param, *WAYS)


@pytest.fixture(scope="session")
def seen_by_two(launched):
    return launched(2, *WAYS)


def by_hand(*, frozen):
    """Six steps of torch's own AdamW on whole batches in one process."""
    policy = TinyPolicy(frozen=frozen)
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    betas = (OPTIONS.beta1, OPTIONS.beta2)
    matrices = [parameter for parameter in learning if parameter.ndim > 1]
    vectors = [parameter for parameter in learning if parameter.ndim == 1]
    assert matrices
    assert vectors
    decayed = {"params": matrices, "weight_decay": OPTIONS.weight_decay}
    groups = [decayed, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=OPTIONS.epsilon)
    norms = []
    for step, (_, _, lr) in enumerate(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr
        rows = rows_of(step)
        (-policy(rows).sum() / global_tokens(rows)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(learning, OPTIONS.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(policy.model.named_parameters()), norms


def tensors(weights):
    return {
        name: torch.tensor(values, dtype=torch.float64) for name, (_, values) in weights.items()
    }


@pytest.mark.parametrize("kind", ["plain", "frozen"])
@pytest.mark.parametrize("way", FLOAT32)
def test_every_way_takes_the_steps_of_torchs_own_adamw(seen, way, kind):
    require_steps_by_hand(seen, way, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "frozen"])
@pytest.mark.parametrize("way", FLOAT32)
def test_more_ranks_take_the_same_steps(seen_by_many, way, kind):
    require_steps_by_hand(seen_by_many, way, kind)


def require_steps_by_hand(seen, way, kind):
    by_torch, norms = by_hand(frozen=kind == "frozen")
    found = seen.first[way][kind]
    weights = tensors(found["weights"])
    for name, parameter in by_torch.items():
        expected = parameter.detach().double()
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=WEIGHTS)
    assert [norm for _, norm in found["updates"]] == pytest.approx(norms, rel=STEP)
    assert all(applied for applied, _ in found["updates"])
    assert min(norms) > OPTIONS.max_grad_norm  # so every step was clipped


@pytest.mark.parametrize("way", [way for way in WAYS if way not in FLOAT32])
def test_bfloat16_stays_near_the_steps_in_float32(seen, way):
    expected, norms = by_hand(frozen=False)
    found = seen.first[way]["plain"]
    weights = tensors(found["weights"])
    for name, parameter in expected.items():
        torch.testing.assert_close(weights[name], parameter.detach().double(), rtol=0.02, atol=0.01)
    assert [norm for _, norm in found["updates"]] == pytest.approx(norms, rel=0.05)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_anywhere(seen, way):
    for rank in seen.ranks:
        assert rank[way]["disturbed"]["refused"] == [[False, True]] * 18
        assert all(applied for applied, _ in rank[way]["disturbed"]["updates"])


@pytest.mark.parametrize("kind", ["disturbed", "resumed"])
@pytest.mark.parametrize("way", WAYS)
def test_what_was_skipped_or_saved_and_loaded_leaves_no_trace(seen, way, kind):
    require_no_trace(seen, way, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disturbed", "resumed"])
@pytest.mark.parametrize("way", WAYS)
def test_nor_does_it_among_more_ranks(seen_by_many, way, kind):
    require_no_trace(seen_by_many, way, kind)


def require_no_trace(seen, way, kind):
    for rank in seen.ranks:
        assert rank[way][kind]["updates"] == rank[way]["straight"]["updates"]
        assert rank[way][kind]["weights"] == rank[way]["straight"]["weights"]


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_part_is_neither_moved_nor_saved_nor_lost(seen, way):
    found = seen.first[way]
    assert found["frozen resumed"] == found["frozen"]
    frozen = found["plain"]["weights"]["embed.weight"][0], tensors(found["frozen"]["weights"])
    dtype = getattr(torch, frozen[0].removeprefix("torch."))
    original = TinyPolicy(dtype=dtype).model.embed.weight.detach().double()
    assert torch.equal(frozen[1]["embed.weight"], original)
    assert set(found["trainable"]) == {"hidden.weight", "hidden.bias", "head.bias"}


PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero3-offload")
CHANGES = [
    pytest.param(way, preset, marks=[] if way in (*FLOAT32[:4], same) else pytest.mark.long)
    for preset in PRESETS
    for same in [f"{preset}/bfloat16"]
    for way in WAYS
]


@pytest.mark.parametrize(("way", "preset"), CHANGES)
def test_what_two_ranks_saved_goes_on_in_one_under_any_stage(seen_by_two, one_rank, way, preset):
    dtype = way.split("/")[1]
    run = Run(one_rank, replace(OPTIONS, deepspeed=preset, dtype=dtype))
    run.step(4)  # moments and weights that have to be replaced
    run.engine.load_state(seen_by_two.folder / way.replace("/", "-"))
    run.updates.clear()
    run.steps(3, 6)
    found = seen_by_two.first[way]["plain"]
    atol, of_norm = (WEIGHTS, STEP) if dtype == "float32" else (0.01, 0.1)
    for name, tensor in tensors(run.weights()).items():
        expected = tensors(found["weights"])[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=atol)
    norms = [norm for _, norm in found["updates"][3:]]
    assert [norm for _, norm in run.updates] == pytest.approx(norms, rel=of_norm)


@pytest.mark.parametrize("way", FLOAT32[:4])
def test_a_clipped_gradient_is_as_long_as_the_option_says(seen, way):
    found = seen.first[way]["clipped"]
    before, after = tensors(found["before"]), tensors(found["after"])
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert found["update"] > 2 * OPTIONS.max_grad_norm
    assert moved.norm().item() == pytest.approx(OPTIONS.max_grad_norm, rel=STEP)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_whole_on_the_first_rank_and_tied_ones_are_given_once(seen, way):
    first, *others = [rank[way]["plain"]["weights"] for rank in seen.ranks]
    assert {name: list(tensor.shape) for name, tensor in tensors(first).items()} == {
        "embed.weight": [VOCABULARY, WIDTH],
        "hidden.weight": [WIDTH, WIDTH],
        "hidden.bias": [WIDTH],
        "head.bias": [VOCABULARY],
        "scale": [1],
    }
    assert {dtype for dtype, _ in first.values()} <= {"torch.float32", f"torch.{way.split('/')[1]}"}
    assert others == [{}] * len(others)


def test_a_rank_whose_disk_refuses_says_so_and_no_other_waits_for_it(seen):
    *others, last = [rank["failed save"] for rank in seen.ranks]
    assert "cannot write the state" in last
    for index, written in enumerate(others):
        own = [f"state/zero_pp_rank_{index}_mp_rank_00_optim_states.pt"]
        assert written == (["state/mp_rank_00_model_states.pt", *own] if index == 0 else own)


def test_a_language_model_learns_the_same_in_every_stage(seen):
    found = seen.first["language model"]
    expected = tensors(found["zero0"]["weights"])
    for preset in ("zero2", "zero3"):
        weights = tensors(found[preset]["weights"])
        assert list(weights) == found[preset]["names"]
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=WEIGHTS)
        norms = [[norm for _, norm in found[way]["updates"]] for way in ("zero0", preset)]
        assert norms[0] == pytest.approx(norms[1], rel=STEP)


def test_values_are_summed_over_ranks(seen):
    size = len(seen.ranks)
    for index, rank in enumerate(seen.ranks):
        found = rank["summed"]
        assert found["total"] == [sum(range(size + 1)), pytest.approx(size * 1e-17)]
        assert found["kept"] == [index + 1.0, 1e-17]
        assert found["world"] == [index, size, index]


def test_ranks_say_nothing_of_their_own(seen):
    assert seen.out == ""
    lines = [line for line in seen.err.splitlines() if "OMP_NUM_THREADS" not in line]
    assert lines == []


def test_the_rows_of_a_step_are_dealt_to_ranks_without_loss():
    for step in range(len(STEPS)):
        dealt = [
            tree
            for rank in range(2)
            for micro in engine_ranks.share(step, rank, 2)
            for tree in micro
        ]
        assert len(dealt) == len(rows_of(step))
        assert math.isclose(global_tokens(dealt), global_tokens(rows_of(step)))
