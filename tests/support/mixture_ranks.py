"""Every rank of a test world: the same training of a mixture of experts, cut and spread in ways.

Started by a launcher, or alone, with a folder to write to, a cache, and the names of the cases.
"""

import json
import sys
from pathlib import Path

from align.schemas.config import LoraOptions, TrainOptions
from align.stages.engine.distributed import joined_world
from support.listed_experts import train_listed
from support.training_world import facts, job_of, learn

# Tokens per micro-batch that make one, some, and eight of a step's eight rows.
BUDGETS = {"whole": 100_000, "thirds": 350, "rows": 1}
TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
SETTINGS = {"max_steps": 3, "warmup": 0.0, "schedule": "constant", "eval_fraction": 0.2}


def run_case(world, name, cache):
    if name.startswith("listed/"):
        preset = str(cache.parent / f"{name.partition('/')[2]}.json")
        return train_listed(world, TrainOptions(dtype="float32", deepspeed=preset))
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
    session, recorded = learn(job, world)
    weights = session.engine.weights(trainable_only=True)
    return {
        "steps": [facts(metrics) for _, metrics in recorded.steps],
        "evaluation": facts(recorded.evaluations[-1][1]),
        "weights": {key: tensor.flatten().tolist() for key, tensor in weights.items()},
    }


def main(folder, cache, *names):
    with joined_world() as world:
        seen = {name: run_case(world, name, Path(cache)) for name in names}
    (Path(folder) / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
