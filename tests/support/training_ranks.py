"""Every rank of a test world: the same training, cut up and spread in every way.

Started by a launcher, or alone, with a folder to write to, the caches, and the names of the cases.
"""

import gc
import json
import sys
from pathlib import Path

from align.stages.engine.distributed import joined_world
from align.stages.methods.table import METHODS as TABLE
from support.rounding import EPSILON
from support.training_trouble import KINDS, nonfinite, stop_reasons
from support.training_world import START, facts, job_of, learn

# Tokens per micro-batch that make one, about three, and eight of a step's eight rows.
BUDGETS = {"whole": 100_000, "thirds": 350, "rows": 1}
METHODS = {
    "dpo": ("pairs", "dpo", {}),
    "kto": ("pairs", "kto", {}),
    "orpo": ("pairs", "orpo", {}),
    "kto-some": ("pairs", "kto", {"kl_per_step": 5}),
    "kto-all": ("pairs", "kto", {"kl_use": "all"}),
    "kto-classes": ("labels", "kto", {}),
    **{f"table-{name}": ("everything", name, {}) for name in TABLE},
}
# The last number: so many ranks share every sequence.
SHARED = (
    "dpo/thirds/zero1/2",
    "orpo/thirds/zero2/2",
    "kto-all/rows/zero1/2",
    "table-reward/rows/zero1/2",
    "table-ppo/rows/zero1/2",
)
LEARNING = {
    "max_steps": 10,
    "warmup": 0.0,
    "schedule": "constant",
    "eval_fraction": 0.2,
    "epsilon": EPSILON,
}


def run_case(world, name, caches):
    method, budget, preset, *shared = name.split("/")
    cache, known_as, options = METHODS[method]
    length = {"max_steps": 3} if method.startswith("table-") else {}
    job = job_of(
        caches[cache],
        known_as,
        options=options,
        tokens_per_batch=BUDGETS[budget],
        deepspeed=preset,
        sequence_parallel=int(*shared or "1"),
        **(LEARNING | length),
    )
    session, recorded = learn(job, world)
    weights = session.engine.weights()
    with session.feed.steps(START.cursor) as batches:
        turns = [len(batch.own) for batch in batches]
    return {
        "steps": [facts(metrics) for _, metrics in recorded.steps],
        "evaluations": [facts(metrics) for _, metrics in recorded.evaluations],
        "samples": [[_plain(one) for one in samples] for samples in recorded.samples],
        "weights": {key: tensor.flatten().tolist() for key, tensor in weights.items()},
        "micro_batches": turns,
    }


def _plain(samples):
    whose = [samples.row, samples.row_id, samples.role.name, samples.num_tokens]
    return [whose, [samples.logp, samples.reference_logp]]


def main(folder, pairs, labels, everything, *names):
    caches = {"pairs": pairs, "labels": labels, "everything": everything}
    gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine
    with joined_world() as world:
        seen = {name: run_case(world, name, caches) for name in names if name != "trouble"}
        if "trouble" in names:
            seen["nonfinite"] = {kind: nonfinite(world, pairs, kind) for kind in KINDS}
            seen["stop reasons"] = stop_reasons(world, pairs)
    (Path(folder) / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
