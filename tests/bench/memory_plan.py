"""The memory that `align plan` expects, beside the measured peak of trainings on a CPU.

    python tests/bench/memory_plan.py [--only WORD]

Each configuration of tests/support/measured_peaks.py trains a random model for three steps in
processes of its own, and the third step is measured in two ways: the bytes of all tensors that are
alive, which is what torch.cuda.max_memory_allocated() counts on a GPU; and the peak of the process
(VmHWM), from which everything that is no tensor is taken off, as it stands before the step. The C
library gives freed blocks back at once. Of several ranks, the highest peak counts.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import sides
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from align.schemas.config import ModelOptions
from align.schemas.rows import Tree
from align.stages.engine.deepspeed_config import EngineContext, loading_config
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import joined_world, run_on_all_ranks
from align.stages.model.load import load_model
from align.stages.model.policy import load_policy
from align.stages.model.sharded_load import load_sharded
from support.live_bytes import LiveBytes
from support.measured_peaks import CASES, MODELS, Case, options_of, plan_of

STEPS, MIB = 3, 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measured_here(**json.loads(arguments.worker))), flush=True)
        return
    print(
        "| configuration | planned | measured | VmHWM | off by |\n|---|---|---|---|---|", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if arguments.only in case.name:
                place = made(case, Path(folder))
                estimate, found = plan_of(case, place), measured(case, place)
                planned = (estimate.peak - estimate.process) / MIB
                off = planned / found["peak"] - 1
                cells = [planned, found["peak"], found["process"]]
                row = [case.name, *(f"{cell:,.0f}" for cell in cells), f"{off:+.1%}"]
                print(f"| {' | '.join(row)} |", flush=True)


def made(case, folder):
    """The folder of the case's model, of random weights."""
    place = folder / f"{case.model}-{case.dtype}".replace(" ", "-")
    if not place.exists():
        torch.manual_seed(0)
        config = LlamaConfig(**MODELS[case.model])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
        model.save_pretrained(place)
    return place


def trees_of(case):
    random, vocabulary = np.random.default_rng(0), MODELS[case.model]["vocab_size"]
    drawn = random.integers(0, vocabulary, (case.rows, 3, case.length)).astype(np.int32)
    return [Tree(prompt, (chosen, rejected)) for prompt, chosen, rejected in drawn]


def measured(case, place):
    """Runs the ranks; returns the figures of the one with the highest peak."""
    words = json.dumps({"case": asdict(case), "place": str(place)})
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    port = str(29500 + os.getpid() % 1000)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(case.ranks)}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", words],
            env={**os.environ, **own, **(rank if case.ranks > 1 else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in ranks
    ]
    said = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), case.name
    return max((json.loads(one.splitlines()[-1]) for one in said), key=lambda one: one["peak"])


def measured_here(case, place):
    """One rank of a case, in this process."""
    with joined_world() as world:
        return Measurement(Case(**case), Path(place), world).run()


class Measurement:
    """One rank's training, whose last step is measured."""

    def __init__(self, case, place, world):
        self.case, self.trees, self.live = case, trees_of(case), LiveBytes()
        config, load = options_of(case), load_model
        width, train = MODELS[case.model]["hidden_size"], config.train
        if zero3 := loading_config(train, world, EngineContext(case.dtype, width, world.size)):
            together = partial(run_on_all_ranks, world)
            load = partial(load_sharded, config=zero3, together=together)
        self.policy = load_policy(ModelOptions(path=str(place)), train, config.lora, load=load)
        self.engine, _ = open_engine(self.policy, train, world, hidden_size=width)
        if self.policy.is_sharded:
            self.policy.choose_path()

    def run(self):
        gc.collect()
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                self.live.count(one)
        with self.live:
            for step in range(STEPS):
                if step == STEPS - 1:  # only what happens from here on is measured
                    gc.collect()
                    others = sides.memory_mib("VmRSS") - self.live.now / MIB
                    Path("/proc/self/clear_refs").write_text("5")
                    self.live.restart()
                self.step()
        return {"peak": self.live.most / MIB, "process": sides.memory_mib("VmHWM") - others}

    def step(self):
        for index in range(self.case.micro_batches):
            self.engine.learn_mode(dropout_seed=1)
            loss = -self.engine.forward(self.trees)["logps"].double().mean()
            self.engine.backward(loss, is_last=index == self.case.micro_batches - 1)
            del loss
        self.engine.step()


if __name__ == "__main__":
    main()
