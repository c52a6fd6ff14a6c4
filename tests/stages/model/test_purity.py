"""log sum_v p_v ** 2 of every completion token, without its gradient and without the logits."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.stages.model.fused_head import TILE_ROWS, TILE_VOCABULARY, HeadSpec, OutputHead
from align.stages.model.fused_head_backward import fused_rows
from align.stages.model.policy import Policy, load_policy
from support.branch_by_branch import THREE_FAMILIES, num_tokens, own_predictions, slopes_of
from support.families import TREE_FAMILIES, mixed_trees, tiny_model
from support.largest_storage import LargestStorage

pytestmark = pytest.mark.numeric

HIDDEN = 16
WIDE = TILE_VOCABULARY["cpu"] * 2 + 37  # two whole tiles and a part of one
TREES = tuple(mixed_trees())


def test_the_purity_of_one_token_by_hand():
    # z = (0, ln 3), so p = (1/4, 3/4) and log sum p ** 2 = log(1/16 + 9/16)
    head = OutputHead(torch.tensor([[0.0], [math.log(3)]]), None, HeadSpec())
    rows = fused_rows(head, torch.ones(1, 1), torch.tensor([0]), purity=True)
    assert rows.flatten().tolist() == pytest.approx([math.log(1 / 4), math.log(10 / 16)])


@pytest.mark.parametrize("spec", [HeadSpec(), HeadSpec(scale=0.0625), HeadSpec(0.5, 3.0)])
@pytest.mark.parametrize("vocabulary", [5, TILE_VOCABULARY["cpu"], WIDE])
def test_the_fused_purity_equals_that_of_a_float64_softmax(spec, vocabulary, monkeypatch):
    monkeypatch.setitem(TILE_ROWS, "cpu", 7)
    head, hidden, targets = case(vocabulary, spec)
    found = fused_rows(head, hidden, targets, purity=True)[1]
    logits = spec.scale * (hidden.double() @ head.weight.double().t() + head.bias.double())
    if spec.softcap:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    expected = purity_of(logits)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_logits_of_ten_thousand_in_several_tiles_do_not_overflow():
    weight = torch.zeros(WIDE, 1)
    weight[[0, -1]] = 1e4  # half and half: log(1/4 + 1/4)
    rows = fused_rows(
        OutputHead(weight, None, HeadSpec()), torch.ones(1, 1), torch.tensor([0]), purity=True
    )
    assert rows.flatten().tolist() == pytest.approx([-math.log(2), -math.log(2)], abs=2e-3)


def test_log_probs_and_gradients_are_the_same_to_the_bit_when_purity_is_told_as_well():
    found = []
    for purity in (False, True):
        head, hidden, targets = case(WIDE)
        leaves = [hidden.requires_grad_(), head.weight.requires_grad_(), head.bias.requires_grad_()]
        rows = fused_rows(head, hidden, targets, purity=purity)
        rows.sum().backward()  # the purity's own slope is 1 here, and none of it comes through
        found.append([rows[0], *(leaf.grad for leaf in leaves)])
    assert all(map(torch.equal, *found))


def test_nothing_grows_with_the_vocabulary():
    def largest(vocabulary):
        head, hidden, targets = case(vocabulary, rows=1500)
        with LargestStorage(ignore={head.weight.untyped_storage().data_ptr()}) as seen:
            fused_rows(head, hidden, targets, purity=True)
        return seen.elements

    assert largest(4096) == largest(4 * 4096) <= 2 * (1 << 22)


@pytest.mark.parametrize("name", THREE_FAMILIES)
def test_a_policy_tells_the_purity_of_its_own_logits(name):
    model = tiny_model(*TREE_FAMILIES[name])
    with torch.no_grad():
        _, logits, _ = own_predictions(deepcopy(model).double(), TREES)
    policy = Policy(model, purity=True).eval()
    for head in ("fused", "exact"):
        for layout in dict.fromkeys((policy.path.layout, "tree", "plain")):
            policy.path = replace(policy.path, layout=layout, head=head)
            logps, purity = policy(TREES).detach()
            torch.testing.assert_close(purity.double(), purity_of(logits), atol=1e-4, rtol=0)
            assert (purity <= 0).all()
            assert logps.shape == purity.shape == (num_tokens(TREES),)


@pytest.mark.parametrize("head", ["fused", "exact"])
def test_purity_leaves_the_policys_gradient_as_it_is(llama, head):
    slopes, found = slopes_of(num_tokens(TREES)), []
    for purity in (False, True):
        policy = Policy(deepcopy(llama), purity=purity)
        policy.path = replace(policy.path, head=head, layout="tree")
        rows = policy(TREES)
        loss = (rows[0] * slopes).sum() + (7 * rows[1].sum() if purity else 0)
        loss.backward()
        found.append([parameter.grad for parameter in policy.parameters()])
    assert all(map(torch.equal, *found))


def test_purity_is_told_only_where_it_is_asked_for(saved_llama):
    options = ModelOptions(path=str(saved_llama)), TrainOptions(dtype="float32"), LoraOptions()
    assert load_policy(*options).output_names == ("logps",)
    policy = load_policy(*options, purity=True)
    assert policy.output_names == ("logps", "purity")
    assert policy(()).shape == (2, 0)


def purity_of(logits):
    return torch.log_softmax(logits.double(), -1).mul(2).logsumexp(-1)


def case(vocabulary, spec=None, rows=40):
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(vocabulary, HIDDEN, generator=random)
    bias = torch.randn(vocabulary, generator=random)
    hidden = torch.randn(rows, HIDDEN, generator=random)
    targets = torch.randint(vocabulary, (rows,), generator=random)
    return OutputHead(weight, bias, spec or HeadSpec()), hidden, targets
