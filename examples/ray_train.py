"""Trains on the workers of a Ray cluster: `align.train` as the loop of ray.train.TorchTrainer.

    pip install '.[ray]'
    python examples/ray_train.py --cache align-cache --output align-run --workers 2

`--set train.max_steps=100` and the like are settings of align. Cache and run folder have to be on a
file system that all workers share. Ray replaces a lost worker up to `--max-failures` times, and the
run resumes from its last checkpoint.
"""

import argparse
import json
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import align


def train_on_worker(arguments: dict) -> None:
    """What each worker runs; Ray has set RANK, WORLD_SIZE and MASTER_ADDR, as torchrun does."""
    # Ray has joined the workers; align joins them itself, and names lost ones.
    torch.distributed.destroy_process_group()
    align.train(**arguments)


def typed(value: str) -> object:
    """A number or truth value as JSON writes it; anything else is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def main() -> None:
    """Reads the arguments, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--method", default="dpo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU per worker")
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    given = parser.parse_args()
    settings = {name: typed(value) for name, _, value in (one.partition("=") for one in given.set)}
    output = Path(given.output).resolve()  # workers have folders of their own
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={
            "method": given.method,
            "cache": str(Path(given.cache).resolve()),
            "output": str(output),
            "settings": settings | {"train.resume": "auto"},
            "progress": False,
        },
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        torch_config=TorchConfig(backend="nccl" if given.gpu else "gloo"),
        run_config=RunConfig(
            storage_path=str(output.parent),
            name=f"{output.name}-ray",
            failure_config=FailureConfig(max_failures=given.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    ray.init()
    main()
