"""Every rank of a test world: the same training of a mixture of experts, cut and spread in ways.

Started by a launcher, or alone, with a folder to write to, a cache, and the names of the cases.
"""

import json
import sys
from pathlib import Path

from align.stages.engine.distributed import joined_world
from support.training_world import facts, job_of, learn

# Tokens per micro-batch that make one, some, and eight of a step's eight rows.
BUDGETS = {"whole": 100_000, "thirds": 350, "rows": 1}
SETTINGS = {"max_steps": 3, "warmup": 0.0, "schedule": "constant", "eval_fraction": 0.2}


def run_case(world, name, cache):
    budget, preset, weight, *others = name.split("/")
    job = job_of(
        cache,
        "dpo",
        tokens_per_batch=BUDGETS[budget],
        deepspeed=preset,
        router_loss=float(weight),
        gradient_checkpointing="recomputing" in others,
        **SETTINGS,
    )
    session, recorded = learn(job, world)
    weights = session.engine.weights()
    return {
        "steps": [facts(metrics) for _, metrics in recorded.steps],
        "evaluation": facts(recorded.evaluations[-1][1]),
        "weights": {key: tensor.flatten().tolist() for key, tensor in weights.items()},
    }


def main(folder, cache, *names):
    with joined_world() as world:
        seen = {name: run_case(world, name, cache) for name in names}
    (Path(folder) / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
