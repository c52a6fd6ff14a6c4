"""Each optimizer's steps beside a slow one in float64, and what its state takes and gives back."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.optimizers import KINDS, most_states, optimizer_block
from align.stages.engine.update_rules import Lion, Muon, orthogonalized
from align.stages.model.policy import load_policy
from support.engine_ranks import OPTIONS, Run, disturbed, resumed, saved
from support.slow_rules import RULES, require_steps, slowly

pytestmark = pytest.mark.numeric

FLOAT32 = replace(OPTIONS, dtype="float32")
BFLOAT16 = replace(OPTIONS, dtype="bfloat16", optimizer_dtype="bfloat16", deepspeed="zero2")


def straight_on(world, options, folder):
    """The weights after six steps, in which nothing leaves a trace."""
    straight, again = resumed(world, options, folder / "state")
    assert again == straight
    seen = disturbed(Run(world, options))
    assert [seen["updates"], seen["weights"]] == [straight["updates"], straight["weights"]]
    return straight["weights"]


@pytest.mark.parametrize(
    ("dtype", "name", "preset"),
    [
        ("float32", "lion", "zero3"),
        ("float32", "adamw", "zero2-offload"),
        ("float32", "muon", "zero0"),
        ("bfloat16", "muon", "zero0"),
        ("bfloat16", "adafactor", "zero0"),
    ],
)
def test_the_steps_are_those_of_a_slow_one_in_float64_and_nothing_leaves_a_trace(
    one_rank, tmp_path, dtype, name, preset
):
    """In bfloat16 DeepSpeed takes one step as it begins, which leaves none either."""
    options = replace(OPTIONS, dtype=dtype, optimizer=name, deepspeed=preset)
    found = straight_on(one_rank, options, tmp_path)
    if name == "adafactor":
        return  # of transformers
    if dtype == "float32":
        require_steps(name, found)
        return
    # As a whole: of single elements the sign that Lion steps by may turn in 16 bits.
    exact = {key: ["", one.tolist()] for key, one in slowly(RULES[name])[0].items()}
    assert distance(exact, found) < 0.2 * distance(exact, Run(one_rank, options).weights())


@pytest.mark.parametrize("name", [name for name in KINDS if name != "adamw8bit"])
def test_the_table_says_how_much_each_keeps(name):
    """Of a matrix that it updates as a whole, and of one that it updates as AdamW does."""
    kind, kept = KINDS[name], {}
    options = optimizer_block(TrainOptions(optimizer=name))["optimizer"]["params"]
    for orthogonal in (True, False):
        one = torch.nn.Parameter(torch.randn(64, 64))
        group = {"params": [one], **({"orthogonal": orthogonal} if kind.is_for_matrices else {})}
        optimizer = (kind.make or torch.optim.AdamW)([group], **options)
        one.grad = torch.ones_like(one)
        optimizer.step()
        numbers = [state for state in optimizer.state[one].values() if torch.is_tensor(state)]
        kept[orthogonal] = sum(state.numel() for state in numbers) / one.numel()
    few = 0.05  # counters of steps, and Adafactor's rows and columns
    assert kept[True] == pytest.approx(kind.states, abs=few)
    most = most_states({"optimizer": {"type": kind.type}})
    assert max(kept.values()) == pytest.approx(most, abs=few)


def test_lion_moves_by_the_sign_of_momentum_and_gradient():
    """b1 = 0.5, b2 = 0.75, lr 0.1, no decay; w = 1, g = 4, then g = -1:

    sign(0.5 * 0 + 0.5 * 4) = 1, w = 0.9, m = 0.25 * 4 = 1;
    sign(0.5 * 1 - 0.5 * 1) = 0, w = 0.9, m = 0.75 - 0.25 = 0.5.
    """
    weight = torch.nn.Parameter(torch.ones(1))
    rule = Lion([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.0)
    for gradient, expected, moment in [(4.0, 0.9, 1.0), (-1.0, 0.9, 0.5)]:
        weight.grad = torch.tensor([gradient])
        rule.step()
        assert weight.item() == pytest.approx(expected)
        assert rule.state[weight]["exp_avg"].item() == pytest.approx(moment)


def test_muon_brings_singular_values_near_one():
    """Those of this matrix are 8 and 6, in columns of its own each; its last column stays 0."""
    matrix = torch.tensor([[0.0, 6.0, 0.0], [8.0, 0.0, 0.0]])
    found = orthogonalized(matrix)
    assert torch.equal(found.abs() > 0.6, matrix > 0)
    assert found.abs().max() < 1.3
    assert torch.equal(orthogonalized(matrix.mT), found.mT)
    # Experts of a mixture stand in one tensor: each is a matrix by itself.
    both = torch.stack([matrix, matrix.flip(0)])
    assert torch.allclose(orthogonalized(both)[1], orthogonalized(matrix.flip(0)))


def test_muon_moves_a_tall_matrix_as_it_does_the_same_one_turned():
    tall, wide = (torch.nn.Parameter(torch.zeros(*shape)) for shape in ((5, 2), (2, 5)))
    tall.grad = torch.arange(10.0).view(5, 2)
    wide.grad = tall.grad.mT.clone()
    groups = [{"params": [tall, wide], "orthogonal": True}]
    Muon(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    torch.testing.assert_close(tall.mT, wide)
    # Two singular values of 0.7 to 1.2, times 0.2 and the root of the longer side.
    assert 0.1 * 0.2 * 5**0.5 * 0.9 < tall.norm() < 0.1 * 0.2 * 5**0.5 * 1.8


def test_states_in_bfloat16_stay_near_the_slow_ones(one_rank, tmp_path):
    found = straight_on(one_rank, replace(BFLOAT16, deepspeed="zero3"), tmp_path)
    # Six roundings of a weight are up to 2^-9 of it each.
    require_steps("adamw", found, rtol=0.02, atol=0.02)


def test_eight_bits_of_moments_resume_bit_for_bit_where_they_were_saved(one_rank, world, tmp_path):
    """Of parameters with 4,096 values or more, which those of the smallest policy do not have."""
    options = replace(FLOAT32, deepspeed="zero1", optimizer="adamw8bit")

    def fresh(**other):
        model = ModelOptions(path=str(world.model), device="cpu")
        changed = replace(options, **other)
        return Run(one_rank, changed, policy=load_policy(model, changed, LoraOptions()))

    run, other = saved(fresh().steps(3, 5), tmp_path / "state"), fresh()
    other.engine.load_state(tmp_path / "state")
    assert other.steps(5, 6).weights() == run.steps(5, 6).weights()
    plain = fresh(optimizer="adamw").steps(3, 6).weights()
    assert 0 < distance(plain, run.weights()) < 0.1 * distance(plain, fresh().weights())
    with pytest.raises(UsageError, match="ranks: 1, ZeRO stage: 1"):
        fresh(deepspeed="zero2").engine.load_state(tmp_path / "state")


def distance(one, other):
    pairs = ((torch.tensor(one[key][1]), torch.tensor(other[key][1])) for key in one)
    return torch.stack([(first - second).norm() for first, second in pairs]).norm().item()


def test_without_a_compiler_torchs_adamw_takes_the_place_of_deepspeeds(
    one_rank, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"optimizer": {"type": "AdamW"}, "zero_optimization": zero}))
    with caplog.at_level(logging.WARNING, "align"):
        run = Run(one_rank, replace(FLOAT32, deepspeed=str(path)))
    assert "cannot be compiled" in caplog.text
    assert run.config["optimizer"]["params"]["torch_adam"]
    require_steps("adamw", run.steps(0, 6).weights())
