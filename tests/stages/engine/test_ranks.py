"""What ranks do together: one launch for each number of them, of which the tests read what it saw.

Two ranks go through every case; one rank, which is this process, through some.
"""

import gc
import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from align.stages.engine.distributed import joined_world
from support.engine_ranks import OPTIONS, STEPS, WEIGHTS, WIDTH, Run, global_tokens, rows_of
from support.policy_ranks import KINDS as POLICIES
from support.programs import Seen, run_program
from support.ranks import seen_by
from support.rounding import NATS, STEP
from support.sharded_ranks import KINDS as LOADS
from support.sharded_ranks import make_models
from support.shared_ranks import SHARED
from support.slow_rules import require_steps
from support.tiny_policy import VOCABULARY, TinyPolicy

pytestmark = pytest.mark.numeric
SUMS = 1e-5  # n u of some sixty terms is 4e-6, and each of two ways may be as far off
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero3-offload")
FLOAT32 = [f"{preset}/float32" for preset in PRESETS]
BFLOAT16 = [f"{preset}/bfloat16" for preset in PRESETS[:4]]  # each by an optimizer of its own
WAYS = FLOAT32 + BFLOAT16
OPTIMIZERS = ["adamw/zero2-offload", "lion/zero2", "muon/zero0", "adafactor/zero0"]
ALONE = ["zero0/float32", "zero1/bfloat16", "zero3/float32"]
CASES = {
    1: [
        *(f"engine/{way}" for way in ALONE),
        *("policy/adapted values/3", "policy/scores/3", "loaded/values"),
        *("summed", "failed save"),
    ],
    2: [
        *(f"engine/{way}" for way in WAYS),
        *(f"optimizer/{name}" for name in OPTIMIZERS),
        *("summed", "failed save", "language model"),
        *(f"policy/{kind}/{stage}" for kind in POLICIES for stage in (0, 3)),
        *(f"loaded/{kind}" for kind in LOADS),
        *("shared sequences", "counted", "slow first rank"),
    ],
    3: [f"engine/{way}" for way in WAYS],
    4: [f"engine/{way}" for way in WAYS],
}


@pytest.fixture(scope="module")
def ranks_of(world, tmp_path_factory):
    """What every rank of a world saw; each is launched once."""

    root = tmp_path_factory.mktemp("ranks")

    @cache
    def ranks_of(size):
        folder = root / f"of-{size}"
        folder.mkdir()  # a launch that failed is not tried again
        make_models(folder / "models")
        (folder / "models" / "world").symlink_to(world.model)
        if size == 1:
            gc.freeze()  # as the program does
            with joined_world() as alone:
                found = [json.loads(json.dumps(seen_by(alone, folder, CASES[1])))]
            gc.unfreeze()
            return Seen(found, "", "", folder)
        done = run_program("ranks", folder, size, *CASES[size])
        paths = [folder / f"rank-{rank}.json" for rank in range(size)]
        found = [json.loads(path.read_text()) for path in paths]
        return Seen(found, done.stdout, done.stderr, folder)

    return ranks_of


def cases(start, end=""):
    """For each case whose name begins and ends so; those of more ranks take long."""
    found = [
        pytest.param(size, case, marks=[pytest.mark.long] if size > 2 else [])
        for size, names in CASES.items()
        for case in names
        if case.startswith(start) and case.endswith(end)
    ]
    return pytest.mark.parametrize(("size", "case"), found)


def tensors(weights):
    return {
        name: torch.tensor(values, dtype=torch.float64) for name, (_, values) in weights.items()
    }


def require_near(found, expected, *, rtol=0.0, atol):
    for name, parameter in expected.items():
        wanted = parameter.detach().double()
        torch.testing.assert_close(found[name], wanted, rtol=rtol, atol=atol)


@cache
def by_hand(*, frozen):
    """Six steps of torch's own AdamW on whole batches in one process."""
    policy = TinyPolicy(frozen=frozen)
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learning if parameter.ndim > 1]
    vectors = [parameter for parameter in learning if parameter.ndim == 1]
    assert matrices
    assert vectors
    decayed = {"params": matrices, "weight_decay": OPTIONS.weight_decay}
    groups = [decayed, {"params": vectors, "weight_decay": 0.0}]
    betas = (OPTIONS.beta1, OPTIONS.beta2)
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


@cases("engine", "float32")
@pytest.mark.parametrize("kind", ["plain", "frozen"])
def test_every_way_takes_the_steps_of_torchs_own_adamw(ranks_of, size, case, kind):
    by_torch, norms = by_hand(frozen=kind == "frozen")
    found = ranks_of(size).first[case][kind]
    require_near(tensors(found["weights"]), by_torch, atol=WEIGHTS)
    assert [norm for _, norm in found["updates"]] == pytest.approx(norms, rel=STEP)
    assert all(applied for applied, _ in found["updates"])
    assert min(norms) > OPTIONS.max_grad_norm  # so every step was clipped


@cases("engine", "bfloat16")
def test_bfloat16_stays_near_the_steps_in_float32(ranks_of, size, case):
    expected, norms = by_hand(frozen=False)
    found = ranks_of(size).first[case]["plain"]
    require_near(tensors(found["weights"]), expected, rtol=0.02, atol=0.01)
    assert [norm for _, norm in found["updates"]] == pytest.approx(norms, rel=0.05)


@cases("engine")
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_anywhere(ranks_of, size, case):
    for rank in ranks_of(size).ranks:
        assert rank[case]["disturbed"]["refused"] == [[False, True]] * 18
        assert all(applied for applied, _ in rank[case]["disturbed"]["updates"])


@cases("engine")
@pytest.mark.parametrize("kind", ["disturbed", "resumed"])
def test_what_was_skipped_or_saved_and_loaded_leaves_no_trace(ranks_of, size, case, kind):
    for rank in ranks_of(size).ranks:
        assert rank[case][kind]["updates"] == rank[case]["straight"]["updates"]
        assert rank[case][kind]["weights"] == rank[case]["straight"]["weights"]


@cases("engine")
def test_a_frozen_part_is_neither_moved_nor_saved_nor_lost(ranks_of, size, case):
    found = ranks_of(size).first[case]
    assert found["frozen resumed"] == found["frozen"]
    dtype = getattr(torch, case.rpartition("/")[2])
    original = TinyPolicy(dtype=dtype).model.embed.weight.detach().double()
    assert torch.equal(tensors(found["frozen"]["weights"])["embed.weight"], original)
    assert set(found["trainable"]) == {"hidden.weight", "hidden.bias", "head.bias"}


@pytest.mark.parametrize("way", FLOAT32[:4])
def test_a_clipped_gradient_is_as_long_as_the_option_says(ranks_of, way):
    found = ranks_of(2).first[f"engine/{way}"]["clipped"]
    before, after = tensors(found["before"]), tensors(found["after"])
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert found["update"] > 2 * OPTIONS.max_grad_norm
    assert moved.norm().item() == pytest.approx(OPTIONS.max_grad_norm, rel=STEP)


@cases("engine")
def test_weights_are_whole_on_the_first_rank_and_tied_ones_are_given_once(ranks_of, size, case):
    first, *others = [rank[case]["plain"]["weights"] for rank in ranks_of(size).ranks]
    assert {name: list(tensor.shape) for name, tensor in tensors(first).items()} == {
        "embed.weight": [VOCABULARY, WIDTH],
        "hidden.weight": [WIDTH, WIDTH],
        "hidden.bias": [WIDTH],
        "head.bias": [VOCABULARY],
        "scale": [1],
    }
    assert {kind for kind, _ in first.values()} <= {
        "torch.float32",
        f"torch.{case.rpartition('/')[2]}",
    }
    assert others == [{}] * len(others)


# Each kind of spreading is left for each other, and so is each optimizer of bfloat16.
PAIRWISE = {
    ("zero0/float32", "zero0"),
    ("zero0/float32", "zero1"),
    ("zero0/float32", "zero3-offload"),
    ("zero1/float32", "zero0"),
    ("zero1/float32", "zero3"),
    ("zero2/float32", "zero2"),
    ("zero3/float32", "zero0"),
    ("zero3/float32", "zero2"),
    ("zero3-offload/float32", "zero3"),
    ("zero0/bfloat16", "zero3"),
    ("zero1/bfloat16", "zero2"),
    ("zero2/bfloat16", "zero0"),
    ("zero3/bfloat16", "zero1"),
}
CHANGES = [
    pytest.param(way, preset, marks=[] if (way, preset) in PAIRWISE else [pytest.mark.long])
    for way in WAYS
    for preset in PRESETS
]


@pytest.mark.parametrize(("way", "preset"), CHANGES)
def test_what_two_ranks_saved_goes_on_in_one_under_any_stage(ranks_of, one_rank, way, preset):
    dtype = way.split("/")[1]
    run = Run(one_rank, replace(OPTIONS, deepspeed=preset, dtype=dtype))
    run.step(4)  # moments and weights that have to be replaced
    run.engine.load_state(ranks_of(2).folder / way.replace("/", "-"))
    run.updates.clear()
    run.steps(3, 6)
    found = ranks_of(2).first[f"engine/{way}"]["plain"]
    atol, of_norm = (WEIGHTS, STEP) if dtype == "float32" else (0.01, 0.1)
    require_near(tensors(run.weights()), tensors(found["weights"]), atol=atol)
    norms = [norm for _, norm in found["updates"][3:]]
    assert [norm for _, norm in run.updates] == pytest.approx(norms, rel=of_norm)


@cases("optimizer")
def test_ranks_take_the_steps_of_every_optimizer_and_one_goes_on_from_theirs(
    ranks_of, one_rank, size, case
):
    _, name, preset = case.split("/")
    require_steps(name, ranks_of(size).first[case])
    run = Run(one_rank, replace(OPTIONS, dtype="float32", optimizer=name, deepspeed=preset))
    run.step(4)
    run.engine.load_state(ranks_of(size).folder / name)
    require_steps(name, run.steps(3, 6).weights())


@cases("failed save")
def test_a_rank_whose_disk_refuses_says_so_and_no_other_waits_for_it(ranks_of, size, case):
    *others, last = [rank[case] for rank in ranks_of(size).ranks]
    assert "cannot write the state" in last
    for index, written in enumerate(others):
        own = [f"state/zero_pp_rank_{index}_mp_rank_00_optim_states.pt"]
        assert written == (["state/mp_rank_00_model_states.pt", *own] if index == 0 else own)


def test_a_language_model_learns_the_same_in_every_stage(ranks_of):
    found = ranks_of(2).first["language model"]
    expected = tensors(found["zero0"]["weights"])
    for preset in ("zero2", "zero3"):
        weights = tensors(found[preset]["weights"])
        assert list(weights) == found[preset]["names"]
        require_near(weights, expected, atol=WEIGHTS)
        norms = [[norm for _, norm in found[way]["updates"]] for way in ("zero0", preset)]
        assert norms[0] == pytest.approx(norms[1], rel=STEP)


@cases("summed")
def test_values_are_summed_over_ranks(ranks_of, size, case):
    for index, rank in enumerate(ranks_of(size).ranks):
        assert rank[case]["total"] == [sum(range(size + 1)), pytest.approx(size * 1e-17)]
        assert rank[case]["kept"] == [index + 1.0, 1e-17]
        assert rank[case]["world"] == [index, size, index]


def test_ranks_wait_for_one_that_takes_longer_than_a_collective_may(ranks_of):
    found = [rank["slow first rank"] for rank in ranks_of(2).ranks]
    assert found == [[0, 0, [0, 1]], [0, 1, [0, 1]]]


def test_ranks_say_nothing_of_their_own(ranks_of):
    others = ("kernels-community", "[transformers]")  # what two libraries say of other matters
    said = [line for line in ranks_of(2).err.splitlines() if not any(one in line for one in others)]
    assert (ranks_of(2).out, said) == ("", [])


@cases("policy")
def test_ranks_together_have_the_gradient_of_one_process(ranks_of, size, case):
    for rank in ranks_of(size).ranks:
        assert rank[case]["same_outputs"]
        assert rank[case]["compared"] >= 20
        assert rank[case]["worst"] <= SUMS


@cases("policy")
def test_a_step_moves_all_that_learns_and_a_saved_state_brings_it_back(ranks_of, size, case):
    assert ranks_of(size).first[case]["restored"] == [True, True]


@cases("policy")
def test_zero_3_leaves_no_parameter_whole_between_passes(ranks_of, size, case):
    for rank in ranks_of(size).ranks:
        everything = rank[case]["all_elements"]
        assert everything > 0
        assert rank[case]["local_elements"] == (0 if case.endswith("/3") else everything)


@pytest.mark.parametrize("kind", [*SHARED, "an adapter", "recomputed", "nothing"])
def test_ranks_that_share_every_sequence_have_its_numbers_and_its_gradient(ranks_of, kind):
    """Each holds a part of the tokens, and attends for a part of the heads, filled up if odd."""
    for rank in ranks_of(2).ranks:
        seen = rank["shared sequences"][kind]
        assert seen["rows"]
        assert seen["compared"] >= 20
        assert seen["far"] <= NATS
        assert seen["gradients"] <= SUMS


def test_ranks_that_share_a_sequence_may_attend_by_flex(ranks_of):
    assert all(rank["shared sequences"]["flex"]["far"] <= NATS for rank in ranks_of(2).ranks)


def test_models_that_cannot_share_are_refused_on_every_rank(ranks_of):
    for rank in ranks_of(2).ranks:
        neighbours, eager = rank["shared sequences"]["refused"]
        assert "cannot share the sequences of LlamaForCausalLM" in neighbours
        assert "the fused head: off by" in neighbours
        assert "its attention is eager" in eager


def test_a_rank_holds_no_more_than_its_share_while_it_loads(ranks_of):
    for rank in ranks_of(2).ranks:
        count = rank["counted"]
        share = count["all"] / 2
        assert count["kept"] == share
        # Twice the largest parameter beside the share is what a gather would take.
        assert count["most"] <= share + 2 * count["largest"]
        # It is the share, the buffers, and a little beside them.
        assert count["most"] <= share + count["buffers"] + 2**16


@cases("loaded")
def test_the_first_step_of_a_spread_load_is_that_of_the_whole_load(ranks_of, size, case):
    for rank in ranks_of(size).ranks:
        spread, whole = rank[case]["spread"], rank[case]["whole"]
        assert math.isfinite(spread["norm"])
        assert spread["path"] == whole["path"]
        for name in ("outputs", "norm", "weights"):
            assert spread[name] == whole[name], name


def test_no_parameter_is_whole_before_the_first_step(ranks_of):
    for rank in ranks_of(2).ranks:
        assert rank["loaded/tied"]["spread"]["whole_elements"] == 0
        assert rank["loaded/tied"]["whole"]["whole_elements"] > 0
