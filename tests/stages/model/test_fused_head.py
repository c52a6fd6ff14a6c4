import pytest
import torch
from transformers import AutoConfig

from align.stages.model.fused_head import TILE_ROWS, TILE_VOCABULARY, HeadSpec, head_spec
from support.fused_head import fused_logps
from support.largest_storage import LargestStorage
from support.rounding import NATS

pytestmark = pytest.mark.numeric
HIDDEN = 16
WIDE = TILE_VOCABULARY["cpu"] * 2 + 37  # two whole tiles and a part of one


@pytest.mark.parametrize("spec", [HeadSpec(), HeadSpec(scale=0.0625), HeadSpec(softcap=3.0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("vocabulary", [5, TILE_VOCABULARY["cpu"], WIDE])
def test_the_fused_head_equals_a_float64_log_softmax(spec, with_bias, vocabulary):
    hidden, weight, bias, targets = head_inputs(vocabulary, with_bias)
    logps = fused_logps(hidden, weight, bias, targets, spec)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(
        logps.double(), float64_logps(hidden, weight, bias, targets, spec), atol=NATS, rtol=0
    )


def test_more_positions_than_a_tile_has_rows_change_nothing(monkeypatch):
    hidden, weight, bias, targets = head_inputs(50, with_bias=True)
    whole = fused_logps(hidden, weight, bias, targets, HeadSpec())
    monkeypatch.setitem(TILE_ROWS, "cpu", 7)
    torch.testing.assert_close(fused_logps(hidden, weight, bias, targets, HeadSpec()), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_multiplied_in_float32(dtype):
    hidden, weight, _, targets = head_inputs(WIDE, with_bias=False)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logps = fused_logps(hidden, weight, None, targets, HeadSpec())
    expected = float64_logps(hidden, weight, None, targets, HeadSpec())
    torch.testing.assert_close(logps.double(), expected, atol=NATS, rtol=0)


def test_logits_of_ten_thousand_do_not_overflow():
    # z = (0, 1e4): log p of the first is -1e4, of the second 0
    weight = torch.tensor([[0.0], [1e4]])
    logps = fused_logps(torch.ones(2, 1), weight, None, torch.tensor([0, 1]), HeadSpec())
    assert logps.tolist() == pytest.approx([-1e4, 0.0])


def test_the_largest_tensor_does_not_grow_with_the_vocabulary():
    small, large = largest_new_tensor(4096), largest_new_tensor(4 * 4096)
    assert small == large <= 2 * (1 << 22)


def test_the_spec_reads_each_familys_own_words():
    assert head_spec(AutoConfig.for_model("cohere", logit_scale=0.25)) == HeadSpec(scale=0.25)
    assert head_spec(AutoConfig.for_model("granite", logits_scaling=4.0)) == HeadSpec(scale=0.25)
    gemma2 = AutoConfig.for_model("gemma2", final_logit_softcapping=30.0)
    assert head_spec(gemma2) == HeadSpec(softcap=30.0)
    assert head_spec(AutoConfig.for_model("llama")) == HeadSpec()


def largest_new_tensor(vocabulary):
    hidden, weight, bias, targets = head_inputs(vocabulary, with_bias=True, rows=1500)
    with LargestStorage(ignore={weight.untyped_storage().data_ptr()}) as seen:
        fused_logps(hidden, weight, bias, targets, HeadSpec())
    return seen.elements


def head_inputs(vocabulary, with_bias, rows=40):
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, HIDDEN, generator=random)
    weight = torch.randn(vocabulary, HIDDEN, generator=random)
    bias = torch.randn(vocabulary, generator=random) if with_bias else None
    return hidden, weight, bias, torch.randint(vocabulary, (rows,), generator=random)


def float64_logps(hidden, weight, bias, targets, spec):
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * spec.scale
    if spec.softcap:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
