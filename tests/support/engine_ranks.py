"""Tiny policies that a rank of a test world trains in every way, and AdamW written out for them."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import torch

from align.schemas.errors import StorageError
from align.schemas.train_options import TrainOptions
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import agreed
from support.rounding import EPSILON, UNIT, apart
from support.tiny_policy import WIDTH, TinyPolicy, some_trees

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Rows of each step, how many micro-batches it is cut into, and its learning rate.
STEPS = [(8, 1, 3e-3), (7, 3, 1e-2), (9, 2, 1e-2), (5, 4, 5e-3), (1, 1, 2e-3), (6, 2, 1e-3)]
WRONG = [1, 2, 3, 5, 0, 1]  # steps in which the last rank's first micro-batch has rows
OPTIONS = TrainOptions(weight_decay=0.1, max_grad_norm=0.05, lr=1e-3, beta2=0.95, epsilon=EPSILON)
# The six steps, and the rounding of weights up to 4 in each of them.
WEIGHTS = apart(sum(lr for *_, lr in STEPS), norm=OPTIONS.max_grad_norm) + 6 * 4 * UNIT


@cache
def rows_of(step):
    return some_trees(np.random.default_rng(step), STEPS[step][0])


def global_tokens(trees):
    return sum(len(branch) for tree in trees for branch in tree.branches)


def share(step, rank, size):
    """This rank's micro-batches; with few rows some are empty."""
    cuts = np.array_split(np.arange(STEPS[step][0]), STEPS[step][1] * size)
    rows = rows_of(step)
    return [tuple(rows[row] for row in cut) for cut in cuts[rank::size]]


def adamw(weight, gradient, state, lr, decay):
    """One step of one parameter, in float64."""
    b1, b2 = OPTIONS.beta1, OPTIONS.beta2
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = b1 * state.get("m", 0 * weight) + (1 - b1) * gradient
    v = state["v"] = b2 * state.get("v", 0 * weight) + (1 - b2) * gradient**2
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + OPTIONS.epsilon)
    return weight - lr * (step + decay * weight)


@cache
def slowly():
    """Six steps of whole batches: the weights, and the norm of each gradient.

    Vectors have no weight decay.
    """
    policy, norms = TinyPolicy(dtype=torch.float64), []
    states = {parameter: {} for parameter in policy.parameters()}
    for step, (_, _, lr) in enumerate(STEPS):
        rows = rows_of(step)
        (-policy(rows).sum() / global_tokens(rows)).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIONS.max_grad_norm)
        norms.append(norm.item())
        for parameter, state in states.items():
            decay = OPTIONS.weight_decay if parameter.ndim > 1 else 0.0
            parameter.data = adamw(parameter.data, parameter.grad, state, lr, decay)
            parameter.grad = None
    return dict(policy.model.named_parameters()), norms


def require_steps(found, *, rtol=0.0, atol=WEIGHTS):
    """The weights after six steps are those of the slow rule."""
    for key, parameter in slowly()[0].items():
        weight = torch.tensor(found[key][1], dtype=torch.float64)
        torch.testing.assert_close(weight, parameter.detach(), rtol=rtol, atol=atol)


class Run:
    """One engine and its steps."""

    def __init__(self, world, options, *, dropout=0.0, frozen=False, policy=None):
        policy = policy or TinyPolicy(dropout=dropout, frozen=frozen, dtype=DTYPES[options.dtype])
        self.engine, self.config = open_engine(policy, options, world, hidden_size=WIDTH)
        self.world, self.updates = world, []

    def gradients(self, step, *, factor=1.0, finish=True):
        tokens = global_tokens(rows_of(step))
        micros = share(step, self.world.rank, self.world.size)
        for index, trees in enumerate(micros):
            self.engine.learn_mode(dropout_seed=1000 * step + 10 * index + self.world.rank)
            loss = -self.engine.forward(trees)["logps"].double().sum() / tokens
            # Only one rank's first micro-batch goes wrong.
            wrong = index == 0 and self.world.rank == self.world.size - 1
            is_last = finish and index == len(micros) - 1
            self.engine.backward(loss * factor if wrong else loss, is_last=is_last)

    def step(self, step, *, factor=1.0):
        self.engine.set_lr(STEPS[step][2])
        self.gradients(step, factor=factor)
        update = self.engine.step()
        self.updates.append([update.applied, update.grad_norm])

    def steps(self, first, last):
        for step in range(first, last):
            self.step(step)
        return self

    def weights(self, **how):
        weights = self.engine.weights(**how)
        return {name: [str(t.dtype), t.double().tolist()] for name, t in weights.items()}

    def seen(self):
        return {"updates": self.updates, "weights": self.weights()}


def disturbed(run):
    """The same six steps, with gradients between them that must leave no trace."""
    traces = []
    for step in range(6):
        before = run.weights()
        for factor in (float("nan"), float("inf")):
            run.engine.set_lr(1.0)
            run.gradients(WRONG[step], factor=factor)
            traces.append(run.engine.step().applied)
        run.gradients(1)
        run.engine.skip()
        run.gradients(1, finish=False)
        run.engine.skip()
        run.gradients(2, factor=float("nan"))
        run.engine.skip()
        run.engine.skip()
        traces.append(run.weights() != before)
        with torch.no_grad():
            run.engine.learn_mode(dropout_seed=None)
            run.engine.forward(share(2, run.world.rank, run.world.size)[0])["logps"]
        run.step(step)
    return run.seen() | {"traces": traces}


def saved(run, folder):
    """Saves the state of a run."""
    if run.world.rank == 0:
        folder.mkdir()
    run.engine.total(torch.zeros(1))
    run.engine.save_state(folder)
    return run


def resumed(world, options, folder, **how):
    """The results of a run that was saved half-way, and of one that resumed from there."""
    first = saved(Run(world, options, **how).steps(0, 3), folder)
    second = Run(world, options, **how)
    second.step(4)  # moments and weights that have to be replaced
    second.engine.load_state(folder)
    second.updates = list(first.updates)
    return [run.steps(3, 6).seen() for run in (first, second)]


def summed(world, _):
    """The results of collectives."""
    options = replace(OPTIONS, deepspeed="zero0", dtype="float32")
    engine = Run(world, options).engine
    values = torch.tensor([world.rank + 1.0, 1e-17], dtype=torch.float64)
    return {
        "total": engine.total(values).tolist(),
        "kept": values.tolist(),
        "world": [engine.world.rank, engine.world.size, engine.world.local_rank],
        "agreed": [agreed(world, world.rank == 0), agreed(world, True)],
    }


REDUCING = ("all_reduce", "reduce", "reduce_scatter_tensor", "_reduce_scatter_base")


def reduced(world, _):
    """How many values the ranks reduce in a step, by ZeRO stage."""
    found = {}
    for preset in ("zero0", "zero1", "zero2"):
        run, found[preset] = Run(world, replace(OPTIONS, deepspeed=preset, dtype="float32")), []
        for step in (0, 3):
            sizes = []

            def counted(real, sizes=sizes):
                def reduce(*given, **named):
                    tensors = [one for one in (*given, *named.values()) if torch.is_tensor(one)]
                    sizes.append(max(one.numel() for one in tensors))
                    return real(*given, **named)

                return reduce

            with ExitStack() as stack:
                for name in REDUCING:
                    if real := getattr(torch.distributed, name, None):
                        patch = mock.patch.object(torch.distributed, name, counted(real))
                        stack.enter_context(patch)
                run.step(step)
            found[preset].append(sum(size for size in sizes if size > 1))  # but norms and signs
    return found | {"learning": sum(one.numel() for one in TinyPolicy().parameters())}


def failed_save(world, folder):
    """The last rank cannot write its file; returns the error, or the files of the other ranks."""
    run = Run(world, replace(OPTIONS, deepspeed="zero2", dtype="float32"))
    name = f"zero_pp_rank_{world.size - 1}_mp_rank_00_optim_states.pt"
    (folder / "full" / "state" / name).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    try:
        return list(run.engine.save_state(folder / "full"))
    except StorageError as error:
        return str(error)


def everything(world, folder, preset, dtype):
    """Six steps in one go and in every other way; in float32 a part of the policy is frozen."""
    options, way = replace(OPTIONS, deepspeed=preset, dtype=dtype), f"{preset}-{dtype}"
    how = {"dropout": 0.2, "frozen": dtype == "float32"}
    plain = saved(Run(world, options).steps(0, 3), folder / way).steps(3, 6)
    straight, again = resumed(world, options, folder / f"{way}-d", **how)
    last = Run(world, options, **how)
    return {
        "plain": plain.seen(),
        "straight": straight,
        "resumed": again,
        "disturbed": disturbed(last),
        "trainable": list(last.weights(trainable_only=True)),
    }
