"""Every rank of a test world: the same training of a mixture of experts, cut and spread in ways.

Started by a launcher, or alone, with a folder to write to, a cache, and the names of the cases.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

from torch.nn.modules.module import register_module_forward_hook
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from align.schemas.config import LoraOptions, TrainOptions
from align.stages.engine.distributed import joined_world
from support.listed_experts import train_listed
from support.rounding import EPSILON
from support.training_world import facts, job_of, learn

# Tokens per micro-batch that make one, some, and eight of a step's eight rows.
BUDGETS = {"whole": 100_000, "thirds": 350, "rows": 1}
TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
SETTINGS = {
    "max_steps": 3,
    "warmup": 0.0,
    "schedule": "constant",
    "eval_fraction": 0.2,
    "epsilon": EPSILON,
}


def run_case(world, name, cache):
    if name.startswith("listed/"):
        preset = str(cache.parent / f"{name.partition('/')[2]}.json")
        return train_listed(world, TrainOptions(dtype="float32", deepspeed=preset, epsilon=EPSILON))
    budget, preset, weight, *others = name.split("/")
    job = job_of(
        cache,
        "dpo",
        tokens_per_batch=BUDGETS[budget],
        deepspeed=preset,
        router_loss=float(weight),
        gradient_checkpointing="recomputing" in others,
        sequence_parallel=2 if "shared" in others else 1,
        lora=LoraOptions(enabled="adapted" in others, rank=2, targets=TARGETS),
        **SETTINGS,
    )
    with nearest_ties() as ties:
        session, recorded = learn(job, world)
    weights = session.engine.weights(trainable_only=True)
    return {
        "steps": [facts(metrics) for _, metrics in recorded.steps],
        "evaluation": facts(recorded.evaluations[-1][1]),
        "nearest_tie": min(ties),
        "weights": {key: tensor.flatten().tolist() for key, tensor in weights.items()},
    }


@contextmanager
def nearest_ties():
    """How far the last expert that is chosen is ahead of the next, of each router and pass."""
    found = []

    def look(module, _, outputs):
        if isinstance(module, Qwen3MoeTopKRouter):
            best = outputs[0].detach().topk(module.top_k + 1).values
            found.append(float((best[:, -2] - best[:, -1]).min()))

    hook = register_module_forward_hook(look)
    try:
        yield found
    finally:
        hook.remove()


def main(folder, cache, *names):
    with joined_world() as world:
        seen = {name: run_case(world, name, Path(cache)) for name in names}
    (Path(folder) / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
