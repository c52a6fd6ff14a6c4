"""Loads policies for ZeRO-3 in every way, on forked ranks, and writes down what each rank saw.

The imports are paid once: every world is forked from a process that has done them, so the memory
that a rank takes is what the loading takes.
"""

import hashlib
import json
import os
import resource
import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.stages.engine.deepspeed_compat import deepspeed
from align.stages.engine.deepspeed_config import Circumstances, engine_config
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import joined_world
from align.stages.engine.zero3_partitions import open_partitions
from align.stages.model.load import resolve
from align.stages.model.policy import Sharding, load_policy
from align.stages.model.sharded_load import load_sharded
from support.live_bytes import LiveBytes
from support.tiny_policy import some_trees

MIB = 2**20
PRESET = {"deepspeed": "zero3", "weight_decay": 0.1, "lr": 1e-3, "max_grad_norm": 0.5}
LORA = LoraOptions(enabled=True, rank=2)


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def partitions_of(options, train, world):
    found = resolve(options)
    return open_partitions(train, world, Circumstances(found.dtype, found.hidden_size, world.size))


def counted(world, path):
    """Bytes that this rank holds at once while it loads, stored in float32 and computed so."""
    before = resident_mib()
    train = TrainOptions(dtype="float32", **PRESET)
    options = ModelOptions(path=path, device="cpu", dtype="float32")
    partitions = partitions_of(options, train, world)
    began = time.monotonic()
    with LiveBytes() as live:
        model = load_sharded(options, partitions=partitions)
    seconds = time.monotonic() - began
    parameters = list(model.parameters())
    return {
        "loaded_mib": peak_mib() - before,
        "seconds": seconds,
        "most": live.most,
        "buffers": sum(one.nbytes for one in model.buffers()),
        "kept": sum(one.ds_tensor.nbytes for one in parameters),
        "largest": max(4 * one.ds_numel for one in parameters),
        "all": sum(4 * one.ds_numel for one in parameters),
    }


def own(world, path, way, *, adapter="", dtype="float32", head="none", lora=None, model=""):
    """The first step of a policy that was loaded in a way of ours."""
    before, began = resident_mib(), time.monotonic()
    train = TrainOptions(dtype=dtype, model=model, **PRESET)
    options = ModelOptions(path=path, adapter=adapter, device="cpu", dtype=dtype)
    spread = Sharding()
    if way == "sharded":
        spread = Sharding(partitions_of(options, train, world))
    lora = LORA if lora else LoraOptions()
    policy = load_policy(options, train, lora, head=head, purity=head == "values", spread=spread)
    held = sum(p.numel() for p in policy.model.parameters())
    hidden = policy.model.config.hidden_size
    loaded, seconds = peak_mib() - before, time.monotonic() - began
    engine, _ = open_engine(policy, train, world, hidden_size=hidden)
    opened = peak_mib() - before
    trees = tuple(some_trees(np.random.default_rng(world.rank), 3 - world.rank))
    engine.learn_mode(dropout_seed=1)
    outputs = engine.forward(trees)
    engine.backward(sum(values.double().sum() for values in outputs.values()), is_last=True)
    update = engine.step()
    return {
        "loaded_mib": loaded,
        "opened_mib": opened,
        "seconds": seconds,
        "whole_elements": held,
        "outputs": {name: values.tolist() for name, values in outputs.items()},
        "norm": update.grad_norm,
        "weights": {name: digest(tensor) for name, tensor in engine.weights().items()},
        "path": [policy.path.layout, policy.path.head],
    }


def transformers_own(world, path):
    """What transformers and DeepSpeed take by themselves."""
    before, began = resident_mib(), time.monotonic()
    train = TrainOptions(dtype="float32", **PRESET)
    config = engine_config(train, Circumstances("float32", 512, world.size))
    deepspeed.init_distributed()
    kept = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded, seconds = peak_mib() - before, time.monotonic() - began
    deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    del kept
    return {"loaded_mib": loaded, "opened_mib": peak_mib() - before, "seconds": seconds}


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
    yield "transformers", 2, {"large": lambda world: transformers_own(world, large)}
    for way in ("sharded", "whole"):
        # The large one first: a peak is never taken back.
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
