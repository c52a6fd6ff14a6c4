"""Every rank of a test world: what torch computes with, as `make test-kernels` sets it.

Started by a launcher with the folder to write to; its libraries tell the rest on standard output.
"""

import json
import sys
from pathlib import Path

import torch

from align.stages.engine.distributed import joined_world
from align.stages.model.fused_head import HeadSpec
from support.fused_head import fused_logps


def facts():
    """What this process computes with."""
    states, weight = torch.ones(1, 2), torch.eye(2)
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "logp": fused_logps(states, weight, None, torch.tensor([0]), HeadSpec()).item(),
    }


def main(folder):
    torch.ones(4, 4) @ torch.ones(4, 4)  # by MKL
    torch.ones(4, 4).to_mkldnn().to_dense()  # by oneDNN
    with joined_world() as world:
        (Path(folder) / f"rank-{world.rank}.json").write_text(json.dumps(facts()))


if __name__ == "__main__":
    main(*sys.argv[1:])
