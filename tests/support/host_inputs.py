"""What checkpointing keeps on the pretended accelerator, and what on the host.

A program: the folder to write to, and a model.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.stages.model import host_activations
from align.stages.model.policy import load_policy
from support.device_steps import moved, numbers_of
from support.pretended_device import DEVICE, WAITS, Pretended, PretendedDevice
from support.tiny_policy import some_trees

TREES = some_trees(np.random.default_rng(3), 4)


def one_pass(model, device, *, offload):
    """A pass and its gradient, and what lay on the host in between."""
    train = TrainOptions(dtype="float32", gradient_checkpointing=True, checkpoint_offload=offload)
    policy = load_policy(ModelOptions(path=model, device="cpu"), train, LoraOptions())
    moved(policy, device)
    kept, leave = [], host_activations._to_host

    def noted(tensor):
        kept.append(leave(tensor))
        return kept[-1]

    host_activations._to_host = noted
    WAITS.taken()
    logps = policy(TREES)
    host_activations._to_host = leave
    on_host = [one[1] for one in kept if not isinstance(one, torch.Tensor)]
    logps.sum().backward()
    return {
        "logps": numbers_of(logps),
        "gradients": [numbers_of(one.grad) for one in policy.parameters()],
        "on the host": [list(one.shape) for one in on_host if not isinstance(one, Pretended)],
        "layers": policy.model.config.num_hidden_layers,
        "width": policy.model.config.hidden_size,
        "waits": [place for place in WAITS.taken() if "host_activations" in place],
    }


def main(folder, model):
    seen = {"cpu": one_pass(model, torch.device("cpu"), offload=True)}
    with PretendedDevice():
        for offload in (False, True):
            seen[f"offload {offload}"] = one_pass(model, DEVICE, offload=offload)
    (Path(folder) / "rank-0.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
