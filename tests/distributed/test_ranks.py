"""Several ranks together: one launch runs all worlds, and the tests read their results."""

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from support.engine_ranks import OPTIONS, WIDTH, Run, require_steps, slowly
from support.ranks import seen_in
from support.rounding import STEP
from support.sharded_ranks import make_models
from support.tiny_policy import VOCABULARY, TinyPolicy

pytestmark = pytest.mark.numeric
SHAPES = {  # tied weights are given once
    "embed.weight": [VOCABULARY, WIDTH],
    "hidden.weight": [WIDTH, WIDTH],
    "hidden.bias": [WIDTH],
    "head.bias": [VOCABULARY],
    "scale": [1],
}
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero3-offload")
FLOAT32 = [f"engine/{preset}/float32" for preset in PRESETS]
# By an optimizer of its own each.
BFLOAT16 = [f"engine/{preset}/bfloat16" for preset in PRESETS[:4]]
ENGINES = FLOAT32 + BFLOAT16
WHOLLY_SHARDED = ("values", "experts", "heads that differ")
ADDING = ("continued, bfloat16", "new scores", "lora on scores")
KINDS = (*WHOLLY_SHARDED, "adapted, bfloat16", *ADDING)
LOADED = [f"loaded/{kind}" for kind in KINDS]
REFUSED = {"refused/unused": "model.surplus", "refused/another shape": "model.norm.weight"}
OTHERS = ["summed", "reduced", "failed save", "counted", "slow first rank", "refused by the last"]
WORLDS = {
    "one": (1, *FLOAT32[::3], BFLOAT16[1], "summed"),
    "two": (2, *ENGINES, *LOADED, *REFUSED, *OTHERS),
}


@pytest.fixture(scope="module")
def launch(server, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    make_models(models)
    inputs = {"models": models}
    return lambda **worlds: seen_in(server, tmp_path_factory.mktemp("ranks"), inputs, **worlds)


@pytest.fixture(scope="module")
def worlds(launch):
    """The results of every rank of each world."""
    return launch(**WORLDS)


@pytest.fixture(scope="module")
def two(worlds):
    return worlds["two"]


def cases(*kinds):
    """Runs a test for each case of these kinds, in every world that has it."""
    found = [
        (name, case)
        for name, (_, *known) in WORLDS.items()
        for case in known
        if case.partition("/")[0] in kinds
    ]
    return pytest.mark.parametrize(("name", "case"), found)


def tensors(weights):
    return {
        name: torch.tensor(values, dtype=torch.float64) for name, (_, values) in weights.items()
    }


def require_steps_of_engine(ranks, case):
    """Requires the steps of AdamW in float64, and no trace of skipped steps and saves."""
    dtype = case.rpartition("/")[2]
    first, *others = [rank[case] for rank in ranks]
    norms = slowly()[1]
    shapes = {key: list(one.shape) for key, one in tensors(first["plain"]["weights"]).items()}
    assert shapes == SHAPES
    assert all(seen["plain"]["weights"] == {} for seen in others)  # the first rank has the whole
    if dtype == "float32":  # in which a part was frozen
        embedded = tensors(first["straight"]["weights"])["embed.weight"]
        assert torch.equal(embedded, TinyPolicy().model.embed.weight.detach().double())
        assert set(first["trainable"]) == {"hidden.weight", "hidden.bias", "head.bias"}
    near, of_norm = {}, STEP
    if dtype == "bfloat16":  # six roundings of a weight are up to 2^-9 of it each
        near, of_norm = {"rtol": 0.02, "atol": 0.01}, 0.05
    require_steps(first["plain"]["weights"], **near)
    assert [norm for _, norm in first["plain"]["updates"]] == pytest.approx(norms, rel=of_norm)
    assert min(norms) > OPTIONS.max_grad_norm  # so every step was clipped
    for seen in (first, *others):
        assert all(applied for applied, _ in seen["plain"]["updates"])
        for kind in ("disturbed", "resumed"):
            assert seen[kind]["updates"] == seen["straight"]["updates"], kind
            assert seen[kind]["weights"] == seen["straight"]["weights"], kind
        # A gradient that is not finite on one rank changes nothing anywhere.
        assert seen["disturbed"]["traces"] == [False] * 18


@cases("engine")
def test_every_way_takes_the_steps_of_adamw_and_nothing_leaves_a_trace(worlds, name, case):
    require_steps_of_engine(worlds[name].ranks, case)


def test_gradients_are_reduced_once_a_step_where_the_stage_allows_it(two):
    for rank in two.ranks:
        found = rank["reduced"]
        once = found["learning"]
        for preset in ("zero0", "zero1"):
            whole, in_four = found[preset]  # micro-batches
            assert once <= whole == in_four < 1.2 * once
        whole, in_four = found["zero2"]  # no rank keeps the gradients of all weights
        assert in_four == 4 * whole >= 4 * once


@pytest.mark.long
def test_three_ranks_take_the_same_steps(launch):
    """Each of the three has another number of values."""
    seen = launch(three=(3, *ENGINES))["three"]
    for case in ENGINES:
        require_steps_of_engine(seen.ranks, case)


@pytest.mark.parametrize("case", ENGINES)
def test_what_two_ranks_saved_goes_on_in_one(two, one_rank, case, tmp_path):
    _, preset, dtype = case.split("/")
    policy = TinyPolicy(dtype=getattr(torch, dtype))
    run = Run(one_rank, replace(OPTIONS, deepspeed=preset, dtype=dtype), policy=policy)
    run.step(4)  # moments and weights that have to be replaced, as has what the model keeps beside
    policy.model.scale.fill_(9.0)
    run.engine.load_state(two.folder / f"{preset}-{dtype}")
    run.engine.save_state(tmp_path)
    (path,) = tmp_path.glob("state/*mp_rank_00_model_states.pt")
    assert torch.load(path, weights_only=False)["global_steps"] == 3
    run.updates.clear()
    run.steps(3, 6)
    near, of_norm = ({}, STEP) if dtype == "float32" else ({"rtol": 0.02, "atol": 0.01}, 0.1)
    require_steps(run.weights(), **near)
    norms = [norm for _, norm in two.ranks[0][case]["plain"]["updates"][3:]]
    assert [norm for _, norm in run.updates] == pytest.approx(norms, rel=of_norm)


def test_a_rank_whose_disk_refuses_says_so_and_no_other_waits_for_it(two):
    first, last = [rank["failed save"] for rank in two.ranks]
    assert isinstance(last, str)
    assert len(first) == 2  # the model's part and its own


@cases("summed")
def test_values_are_summed_over_ranks_and_all_agree_or_none(worlds, name, case):
    ranks = worlds[name].ranks
    for index, rank in enumerate(ranks):
        total = [sum(range(len(ranks) + 1)), pytest.approx(len(ranks) * 1e-17)]
        assert rank[case] == {
            "total": total,
            "kept": [index + 1.0, 1e-17],
            "world": [index, len(ranks), index],
            "agreed": [len(ranks) == 1, True],  # on what the first rank alone holds for true
        }


def test_ranks_wait_for_one_that_takes_longer_than_a_collective_may(two):
    found = [rank["slow first rank"] for rank in two.ranks]
    assert found == [[0, 0, [0, 1]], [0, 1, [0, 1]]]


def test_what_one_rank_refuses_is_raised_on_all(two):
    assert [rank["refused by the last"] for rank in two.ranks] == [True, True]


def test_a_rank_holds_its_share_and_a_layer_while_it_loads(two):
    for rank, mapped in zip(two.ranks, (1, 0), strict=True):  # the first one maps the files
        count = rank["counted"]
        assert count["kept"] == count["all"] / 2
        most = count["kept"] + 2 * count["largest"] + mapped * count["all"]
        assert count["most"] <= most


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_one_rank_refuses_is_refused_on_all(two, case):
    first, last = (rank[case] for rank in two.ranks)
    assert first == last
    assert REFUSED[case] in first


def require_sharded_load(ranks, case):
    kind = case.partition("/")[2]
    for rank in ranks:
        sharded, whole = rank[case]["sharded"], rank[case]["whole"]
        assert math.isfinite(sharded["norm"])
        for what in ("path", "outputs", "norm", "weights"):
            assert sharded[what] == whole[what], what
        # But for what an adapter or a head of scores adds, none is whole before the first step.
        most = 1 if kind in WHOLLY_SHARDED else whole["whole_elements"]
        assert sharded["whole_elements"] < most
    assert ("lm_head.weight" in ranks[0][case]["sharded"]["weights"]) == (
        kind not in ("values", *ADDING)
    )


@pytest.mark.parametrize("case", LOADED)
def test_the_first_step_of_a_sharded_load_is_that_of_the_whole_load(two, case):
    require_sharded_load(two.ranks, case)


ON_GPUS = {
    require_steps_of_engine: ENGINES,
    require_sharded_load: LOADED,
}


@pytest.fixture(scope="module")
def two_gpus(launch, device, several):
    """The results of ranks that have a GPU each and meet over NCCL."""
    return launch(device=device, two=(2, *chain(*ON_GPUS.values())))["two"]


@pytest.mark.gpu
@pytest.mark.parametrize(("require", "case"), [(f, c) for f, cs in ON_GPUS.items() for c in cs])
def test_two_gpus_do_what_two_ranks_of_a_cpu_do(two_gpus, require, case):
    require(two_gpus.ranks, case)
