"""Loads policies for ZeRO-3 in every way, on forked ranks, and writes down what each rank saw.

The imports are paid once: every world is forked from a process that has done them.
"""

import hashlib
import json
import os
import socket
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.stages.engine.deepspeed_config import Circumstances
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import joined_world
from align.stages.engine.zero3_partitions import open_partitions
from align.stages.model.load import resolve
from align.stages.model.policy import Sharding, load_policy
from align.stages.model.sharded_load import load_sharded
from support.live_bytes import LiveBytes
from support.tiny_policy import some_trees

PRESET = {"deepspeed": "zero3", "weight_decay": 0.1, "lr": 1e-3, "max_grad_norm": 0.5}
LORA = LoraOptions(enabled=True, rank=2)


def partitions_of(options, train, world):
    found = resolve(options)
    return open_partitions(train, world, Circumstances(found.dtype, found.hidden_size, world.size))


def counted(world, path):
    """Bytes that this rank holds at once while it loads, stored in float32 and computed so."""
    train = TrainOptions(dtype="float32", **PRESET)
    options = ModelOptions(path=path, device="cpu", dtype="float32")
    partitions = partitions_of(options, train, world)
    with LiveBytes() as live:
        model = load_sharded(options, partitions=partitions)
    parameters = list(model.parameters())
    return {
        "most": live.most,
        "buffers": sum(one.nbytes for one in model.buffers()),
        "kept": sum(one.ds_tensor.nbytes for one in parameters),
        "largest": max(4 * one.ds_numel for one in parameters),
        "all": sum(4 * one.ds_numel for one in parameters),
    }


def own(world, path, way, *, adapter="", dtype="float32", head="none", lora=None, model=""):
    """The first step of a policy that was loaded in a way of ours."""
    train = TrainOptions(dtype=dtype, model=model, **PRESET)
    options = ModelOptions(path=path, adapter=adapter, device="cpu", dtype=dtype)
    spread = Sharding()
    if way == "sharded":
        spread = Sharding(partitions_of(options, train, world))
    lora = LORA if lora else LoraOptions()
    policy = load_policy(options, train, lora, head=head, purity=head == "values", spread=spread)
    held = sum(p.numel() for p in policy.model.parameters())
    hidden = policy.model.config.hidden_size
    engine, _ = open_engine(policy, train, world, hidden_size=hidden)
    trees = tuple(some_trees(np.random.default_rng(world.rank), 3 - world.rank))
    engine.learn_mode(dropout_seed=1)
    outputs = engine.forward(trees)
    engine.backward(sum(values.double().sum() for values in outputs.values()), is_last=True)
    update = engine.step()
    return {
        "whole_elements": held,
        "outputs": {name: values.tolist() for name, values in outputs.items()},
        "norm": update.grad_norm,
        "weights": {name: digest(tensor) for name, tensor in engine.weights().items()},
        "path": [policy.path.layout, policy.path.head],
    }


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def worlds(paths):
    """Each world's name, its ranks, and what every rank of it does."""
    large, tied, causal, adapter, scores = paths
    kinds = {
        "tied": (tied, {}),
        "bfloat16": (causal, {"dtype": "bfloat16"}),
        "adapter": (causal, {"adapter": adapter}),
        "lora": (tied, {"lora": True}),
        "values": (tied, {"head": "values"}),
        "new scores": (causal, {"head": "score", "adapter": adapter}),
        "scores": (scores, {"head": "score"}),
        "lora on scores": (scores, {"head": "score", "lora": True}),
    }
    yield "counted", 2, {"large": lambda world: counted(world, large)}
    for way in ("sharded", "whole"):
        every = {"large": (large, {})} | kinds
        actions = {
            kind: lambda world, way=way, path=path, how=how: own(world, path, way, **how)
            for kind, (path, how) in every.items()
        }
        yield way, 2, actions
        yield f"{way} alone", 1, {"tied": actions["tied"]}


def fork_ranks(folder, name, size, actions):
    """Ends when all ranks have, each of them well."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    children = []
    for rank in range(size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        own_place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ.update(place | own_place)
        try:
            with joined_world() as world:
                seen = {kind: action(world) for kind, action in actions.items()}
            (folder / f"{name}-{rank}.json").write_text(json.dumps(seen))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0] * size, f"{name}: {ended}"


def main(folder, *paths):
    for name, size, actions in worlds(paths):
        fork_ranks(Path(folder), name, size, actions)


if __name__ == "__main__":
    main(*sys.argv[1:])
