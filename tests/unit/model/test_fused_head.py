"""The output layer in tiles: log-probs, collision log-probs, gradients, beside float64."""

import math

import pytest
import torch
from torch._inductor import config as inductor

from align.stages.model.fused_head import (
    BUFFER_BYTES,
    TILE_ROWS,
    TILE_VOCABULARY,
    HeadSpec,
    LogitsBuffer,
    OutputHead,
    compiled,
    fused_rows,
    grad_logits,
    log_collision,
    log_sum_exp,
)
from support.rounding import NATS

pytestmark = pytest.mark.numeric
SUMS = 1e-5  # n u of 40 positions and 16 states is 4e-6; float64 is not off
HIDDEN = 16
WIDE = TILE_VOCABULARY["cpu"] * 2 + 37  # two whole tiles and a part of one
ROWS = 40
ONE_TILE = 4 * ROWS * TILE_VOCABULARY["cpu"]  # bytes
SIZES = {"none": 0, "one tile and a bit": ONE_TILE + 400, "all": BUFFER_BYTES}


def test_the_gradient_of_one_token_by_hand():
    # h = 2 and W = (0, ln 3 / 2), so z = (0, ln 3), p = (1/4, 3/4), d logp(0) / dz = (3/4, -3/4)
    hidden = torch.tensor([[2.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3) / 2]], requires_grad=True)
    bias = torch.zeros(2, requires_grad=True)
    logps = fused_logps(hidden, weight, bias, torch.tensor([0]), HeadSpec())
    assert logps.item() == pytest.approx(math.log(1 / 4))
    logps.backward()
    assert bias.grad.tolist() == pytest.approx([0.75, -0.75])
    assert weight.grad.flatten().tolist() == pytest.approx([1.5, -1.5])
    assert hidden.grad.item() == pytest.approx(-0.75 * math.log(3) / 2)


def test_the_purity_of_one_token_by_hand():
    # z = (0, ln 3), so p = (1/4, 3/4) and log sum p ** 2 = log(1/16 + 9/16)
    head = OutputHead(torch.tensor([[0.0], [math.log(3)]]), None, HeadSpec())
    rows = fused_rows(head, torch.ones(1, 1), torch.tensor([0]), collision_logps=True)
    assert rows.flatten().tolist() == pytest.approx([math.log(1 / 4), math.log(10 / 16)])


@pytest.mark.parametrize(
    ("spec", "with_bias", "vocabulary", "dtype"),
    [
        (HeadSpec(), False, WIDE, torch.float32),
        (HeadSpec(), True, TILE_VOCABULARY["cpu"], torch.float32),
        (HeadSpec(scale=0.0625), True, WIDE, torch.float32),
        (HeadSpec(softcap=3.0), False, TILE_VOCABULARY["cpu"], torch.float32),
        (HeadSpec(0.5, 4.0), False, 5, torch.float32),
        (HeadSpec(softcap=3.0), True, WIDE, torch.bfloat16),
        (HeadSpec(softcap=3.0), True, WIDE, torch.float16),
    ],
)
def test_numbers_and_gradients_are_those_of_a_float64_log_softmax(
    spec, with_bias, vocabulary, dtype
):
    """In half precision but for the last rounding of the gradient."""
    case = head_case(vocabulary, with_bias=with_bias, dtype=dtype)
    require_numbers(case, spec)
    allowed = SUMS if dtype == torch.float32 else 1.01 * torch.finfo(dtype).eps / 2
    assert worst_gradient(case, spec) <= allowed


@pytest.mark.parametrize(("rows", "buffer"), [(1, "none"), (7, "one tile and a bit"), (7, "all")])
def test_ragged_tiles_of_positions_change_nothing(rows, buffer, monkeypatch):
    monkeypatch.setitem(TILE_ROWS, "cpu", rows)
    case, spec = head_case(WIDE, with_bias=True), HeadSpec(0.5, 4.0)
    require_numbers(case, spec)
    assert worst_gradient(case, spec, LogitsBuffer(SIZES[buffer])) <= SUMS


def test_logits_of_ten_thousand_in_several_tiles_do_not_overflow():
    weight = torch.zeros(WIDE, 1)
    weight[[0, -1]] = 1e4  # half and half: log(1/4 + 1/4)
    head = OutputHead(weight, None, HeadSpec())
    rows = fused_rows(head, torch.ones(2, 1), torch.tensor([0, 1]), collision_logps=True)
    assert rows[0].tolist() == pytest.approx([-math.log(2), -1e4 - math.log(2)], abs=2e-3)
    assert rows[1].tolist() == pytest.approx([-math.log(2)] * 2, abs=2e-3)


def test_numbers_and_gradients_are_the_same_bits_whatever_else_is_asked_for():
    found = []
    for collision_logps in (False, True):
        *leaves, targets, _ = head_case(WIDE, with_bias=True)
        rows = fused_rows(
            OutputHead(*leaves[1:], HeadSpec()), leaves[0], targets, collision_logps=collision_logps
        )
        rows.sum().backward()  # the collision log-probs have slope 1, which is cut off
        with torch.inference_mode():
            scored = fused_logps(*leaves, targets, HeadSpec())
        found.append([rows[0], scored, *(leaf.grad for leaf in leaves)])
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][0], found[0][1])


def test_logits_that_were_written_over_are_projected_again():
    expected = gradients(head_case(WIDE), HeadSpec())
    hidden, weight, _, targets, slopes = head_case(WIDE)
    buffer = LogitsBuffer()
    loss = (fused_logps(hidden, weight, None, targets, HeadSpec(), buffer) * slopes).sum()
    for other in (False, True):
        hidden.grad = weight.grad = None
        newer = other and fused_logps(2 * hidden, weight, None, targets, HeadSpec(), buffer)
        loss.backward(retain_graph=True)
        assert torch.equal(hidden.grad, expected[0])
        assert torch.equal(weight.grad, expected[1])
    hidden.grad = None
    (newer * slopes).sum().backward()  # and the newer ones are whole
    doubled = (2 * hidden).detach().requires_grad_()
    alone = gradients([doubled, weight, None, targets, slopes], HeadSpec())
    assert torch.equal(hidden.grad, 2 * alone[0])


def test_the_weights_gradient_is_summed_in_float32(monkeypatch):
    # Each of 4,096 positions adds 1 - 1/2. In bfloat16 the sum would stand still at 128.
    monkeypatch.setitem(TILE_ROWS, "cpu", 8)
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.long)
    fused_logps(hidden, weight, None, targets, HeadSpec()).sum().backward()
    assert weight.grad.flatten().tolist() == [2048.0, -2048.0]


@pytest.mark.parametrize("slope", [math.nan, 0.0])
def test_a_slope_that_is_not_a_number_or_none_shows_in_the_gradient(slope):
    hidden, weight, bias, targets, _ = head_case(5)
    (fused_logps(hidden, weight, bias, targets, HeadSpec()) * slope).sum().backward()
    for leaf in (hidden, weight):
        assert leaf.grad.isnan().all() if slope else not leaf.grad.any()


@pytest.fixture
def logits():
    """A tile of them; no other test has compiled what a GPU makes of it."""
    compiled.cache_clear()
    yield 5 * torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    compiled.cache_clear()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_what_a_gpu_makes_of_a_tile_is_what_float64_makes_of_it(logits, softcap):
    raw = logits.double().requires_grad_()
    shown = softcap * torch.tanh(raw / softcap) if softcap else raw
    tile = shown.detach().float()
    sums, collision_logps = log_sum_exp(tile).double(), log_collision(tile).double()
    torch.testing.assert_close(sums, shown.detach().logsumexp(1), rtol=0, atol=SUMS)
    exact = shown.detach().softmax(1).square().sum(1).log()
    torch.testing.assert_close(collision_logps, exact, rtol=0, atol=SUMS)
    # They are the slopes of -log p.
    targets = torch.tensor([0, 5, 32, 40, -1, 7, 12])  # two are of other tiles
    inside = (targets >= 0) & (targets < 33)
    beyond = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    logsumexp = torch.logaddexp(shown.logsumexp(1), beyond)  # of this tile and the others
    chosen = shown[torch.arange(7), targets.clamp(0, 32)]
    (logsumexp - torch.where(inside, chosen, 0.0)).sum().backward()
    found = grad_logits(tile, logsumexp.detach().float(), targets, softcap, torch.float32)
    torch.testing.assert_close(found.double(), raw.grad, rtol=SUMS, atol=SUMS)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_without_a_compiler_a_tile_is_computed_uncompiled_and_that_is_said_once(logits, caplog):
    caplog.set_level("WARNING", logger="align")
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        for _ in range(2):
            found = compiled(log_sum_exp)(logits)
            assert torch.equal(found, log_sum_exp(logits))
    (said,) = [one.message for one in caplog.records if one.name == "align"]  # torch says more
    assert "not compiled" in said


def fused_logps(hidden, weight, bias, targets, spec, buffer=None):
    """Log p of `targets` (T,)."""
    head = OutputHead(weight, bias, spec)
    return fused_rows(head, hidden, targets, collision_logps=False, buffer=buffer)[0]


def head_case(vocabulary, *, with_bias=False, dtype=torch.float32):
    """Leaves that want a gradient, targets, and a slope of the loss for each position."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, HIDDEN, generator=random).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=random).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (ROWS,), generator=random)
    slopes = torch.randn(ROWS, generator=random)
    return hidden, weight, bias if with_bias else None, targets, slopes


def require_numbers(case, spec):
    """Log-probs and collision log-probs are those of float64."""
    hidden, weight, bias, targets, _ = case
    found = fused_rows(
        OutputHead(weight, bias, spec), hidden, targets, collision_logps=True
    ).detach()
    assert found.dtype == torch.float32
    logps = float64_log_softmax(hidden, weight, bias, spec).detach()
    chosen = logps.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found[0].double(), chosen, atol=NATS, rtol=0)
    collision_logps = logps.mul(2).logsumexp(1)
    torch.testing.assert_close(found[1].double(), collision_logps, atol=SUMS, rtol=0)


def gradients(case, spec, buffer=None):
    """Those of every leaf there is."""
    *leaves, targets, slopes = case
    (fused_logps(*leaves, targets, spec, buffer) * slopes).sum().backward()
    return [leaf.grad for leaf in leaves if leaf is not None]


def worst_gradient(case, spec, buffer=None):
    """The largest difference from float64, as a share of the largest element of its gradient."""
    gradients(case, spec, buffer)
    *leaves, targets, slopes = case
    doubles = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    logps = float64_log_softmax(*doubles, spec).gather(1, targets[:, None]).squeeze(1)
    (logps * slopes.double()).sum().backward()
    worst = 0.0
    for leaf, double in zip(leaves, doubles, strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == leaf.dtype
            gap = (leaf.grad.double() - double.grad).abs().max() / double.grad.abs().max()
            worst = max(worst, gap.item())
    return worst


def float64_log_softmax(hidden, weight, bias, spec):
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * spec.scale
    if spec.softcap:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return torch.log_softmax(logits, dim=-1)
