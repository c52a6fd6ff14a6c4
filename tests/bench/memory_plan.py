"""The memory that `align plan` says, beside what trainings on a CPU hold at their peak.

    python tests/bench/memory_plan.py [--only WORD]

Each configuration trains a random model for three steps in processes of its own, and the third step
is measured in two ways: the bytes of all tensors that are alive, by component, which is what
torch.cuda.max_memory_allocated() counts on a GPU; and the peak of the process (VmHWM), from which
everything that is no tensor is taken off, as it stands before the step. The C library is told to
give freed blocks back. Of several ranks, the one that holds most counts.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from align.pipeline.plan.memory_plan import MemoryPlanner, Planned
from align.schemas.config import ModelOptions
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.deepspeed_config import EngineContext
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import joined_world, run_on_all_ranks
from align.stages.engine.zero3_loading import loading_config
from align.stages.model.head.fused_head_backward import BUFFER_BYTES
from align.stages.model.loading.load import load_model
from align.stages.model.loading.sharded_load import load_sharded
from align.stages.model.logprobs import causal_model
from align.stages.model.memory.live_memory import LiveMemory
from align.stages.model.policy import load_policy

LENGTH, STEPS, MIB = 64, 3, 2**20  # tokens of a prompt or completion
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536}
SHAPE |= {"vocab_size": 32000}
MODELS = {
    "52M": SHAPE | {"hidden_size": 512, "num_hidden_layers": 6},
    "tied 67M": SHAPE | {"hidden_size": 768, "num_hidden_layers": 8, "tie_word_embeddings": True},
}
PARTS = ("weights", "optimizer", "gradients", "activations", "head", "peak")


@dataclass(frozen=True)
class Case:
    """One configuration."""

    deepspeed: str
    dtype: str = "float32"
    ranks: int = 1
    rows: int = 8  # of a micro-batch, 192 tokens each
    micro_batches: int = 2
    lora: bool = False
    checkpointing: bool = False
    model: str = "52M"

    @property
    def name(self):
        words = [self.model, self.dtype, self.deepspeed, f"{self.ranks} ranks"]
        words += [f"{self.micro_batches} x {self.rows * 3 * LENGTH:,} tokens"]
        words += ["LoRA"] * self.lora + ["checkpointing"] * self.checkpointing
        return ", ".join(words)


STAGES, HALF = ("zero0", "zero1", "zero2", "zero3"), {"dtype": "bfloat16"}
CASES = (
    *(Case(stage) for stage in STAGES),
    *(Case(stage, **HALF) for stage in STAGES),
    *(Case(stage, ranks=2) for stage in STAGES[1:]),
    *(Case(stage, ranks=2, **HALF) for stage in STAGES),
    Case("zero0", lora=True),
    Case("zero1", lora=True, **HALF),
    Case("zero2", lora=True, ranks=2, **HALF),
    Case("zero3", lora=True, ranks=2, **HALF),
    Case("zero0", checkpointing=True),
    Case("zero1", checkpointing=True, **HALF),
    Case("zero1", checkpointing=True, lora=True, **HALF),
    Case("zero3", checkpointing=True, ranks=2, **HALF),
    Case("zero0", rows=24, micro_batches=1),
    Case("zero0", rows=2, micro_batches=4),
    Case("zero1", rows=24, micro_batches=1, **HALF),
    Case("zero2", rows=24, micro_batches=1, ranks=2, **HALF),
    Case("zero0", model="tied 67M"),
    Case("zero1", model="tied 67M", **HALF),
    Case("zero1", model="tied 67M", checkpointing=True, rows=16, **HALF),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measured_here(**json.loads(arguments.worker))), flush=True)
        return
    heads = ("configuration", *(f"{part}: plan, measured" for part in PARTS), "VmHWM", "off by")
    print(f"| {' | '.join(heads)} |\n|---|{'---|' * (len(heads) - 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if arguments.only in case.name:
                print(row(case, *compared(case, Path(folder))), flush=True)


def row(case, plan, found):
    """A line of the table, in MiB."""
    cells = [f"{plan[part]:,.0f}, {found[part]:,.0f}" for part in PARTS]
    cells.append(f"{found['process']:,.0f}")
    cells.append(f"{plan['peak'] / found['peak'] - 1:+.1%}")
    return f"| {' | '.join([case.name, *cells])} |"


def compared(case, folder):
    """What the plan says of a case and what it measures, in MiB."""
    place = folder / f"{case.model}-{case.dtype}".replace(" ", "-")
    if not place.exists():
        torch.manual_seed(0)
        config = LlamaConfig(**MODELS[case.model])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
        model.save_pretrained(place)
    return planned(case, place), measured(case, place)


def trees_of(case):
    random = np.random.default_rng(0)
    drawn = random.integers(0, SHAPE["vocab_size"], (case.rows, 3, LENGTH)).astype(np.int32)
    return [Tree(prompt, (chosen, rejected)) for prompt, chosen, rejected in drawn]


def options_of(case, place):
    train = TrainOptions(
        deepspeed=case.deepspeed, dtype=case.dtype, gradient_checkpointing=case.checkpointing
    )
    return ModelOptions(path=str(place)), train, LoraOptions(enabled=case.lora)


def planned(case, place):
    model, train, lora = options_of(case, place)
    planner = MemoryPlanner(
        Planned(
            model=model,
            train=train,
            lora=lora,
            dtype=case.dtype,
            device="cpu",
            ranks=case.ranks,
            head="none",
            layout="packed",
            trees=trees_of(case),
            micro_batches=case.micro_batches,
        )
    )
    held, traced = planner.parts(planner.own_way)
    gathered = held.buffers if case.deepspeed == "zero3" else 0
    found = {
        "weights": held.weights,
        "optimizer": held.optimizer,
        "gradients": held.later,
        "activations": traced.kept + gathered,
        "head": traced.head,
        "peak": planner.components(planner.own_way).peak,
    }
    return {name: size / MIB for name, size in found.items()}


def measured(case, place):
    """Runs the ranks; the one with the highest peak is told of."""
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
        self.case, self.trees, self.live = case, trees_of(case), LiveMemory("cpu")
        model, train, lora = options_of(case, place)
        width, load = MODELS[case.model]["hidden_size"], load_model
        if config := loading_config(train, world, EngineContext(case.dtype, width, world.size)):
            together = partial(run_on_all_ranks, world)
            load = partial(load_sharded, config=config, together=together)
        self.policy = load_policy(model, train, lora, load=load)
        self.engine, _ = open_engine(self.policy, train, world, hidden_size=width)
        if self.policy.is_sharded:
            self.policy.choose_path()
        self.found = {}
        inner = causal_model(self.policy.model).base_model
        inner.register_forward_hook(self.watch_head)

    def watch_head(self, _, __, output):
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(self.leave_head)

    def leave_head(self, _):
        self.found.setdefault("head", self.live.most - self.before - self.found["activations"])

    def run(self):
        gc.collect()
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                self.live.count(one)
        with self.live:
            for step in range(STEPS):
                if step == STEPS - 1:
                    self.begin()
                self.step()
        self.found["peak"] = self.peak
        self.found = {name: size / MIB for name, size in self.found.items()}
        self.found["process"] = status("VmHWM") - self.others
        return self.found

    def begin(self):
        """Only what happens from here on is measured."""
        gc.collect()
        self.found.clear()
        self.peak = 0
        self.others = status("VmRSS") - self.live.now / MIB
        Path("/proc/self/clear_refs").write_text("5")
        self.live.restart()

    def step(self):
        for index in range(self.case.micro_batches):
            self.engine.learn_mode(dropout_seed=1)
            self.note()
            self.before = self.live.now
            loss = -self.engine.forward(self.trees)["logps"].double().mean()
            self.note()
            self.found["activations"] = self.live.now - self.before
            self.engine.backward(loss, is_last=index == self.case.micro_batches - 1)
            del loss
        self.note()
        self.found |= self.standing()
        self.engine.step()
        self.note()

    def note(self):
        self.peak = max(getattr(self, "peak", 0), self.live.restart())

    def standing(self):
        """Weights, the optimizer's own, and all the rest but the head's buffer: gradients."""
        weights = storages(getattr(one, "ds_tensor", one) for one in self.policy.parameters())
        inner = self.engine._engine.optimizer
        optimizers = [inner, getattr(inner, "optimizer", inner)]
        own = [one for each in optimizers for group in each.param_groups for one in group["params"]]
        for each in optimizers:
            for state in each.state.values():
                own += [one for one in state.values() if isinstance(one, torch.Tensor)]
        masters = getattr(inner, "fp32_partitioned_groups_flat", [])
        owned = storages([*own, *masters])
        held = sum(weights.values())
        optimizer = sum(size for place, size in owned.items() if place not in weights)
        rest = self.live.now - held - optimizer - BUFFER_BYTES
        return {"weights": held, "optimizer": optimizer, "gradients": rest}


def storages(tensors):
    """Bytes by place: what two tensors share counts once."""
    each = (one.untyped_storage() for one in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in each}


def status(name):
    """MiB of a line of this process's status."""
    import sides  # which a test that imports this file has not beside it

    return sides.memory_mib(name)


if __name__ == "__main__":
    main()
