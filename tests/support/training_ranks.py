"""Every rank of a test world: the same training, cut up and spread in every way.

A program: the folder to write to, the caches as NAME=FOLDER, and the cases. A case is one of
`training_trouble`, or KIND/MICRO-BATCHES/PRESET and words; a number among those says how many ranks
share every sequence.
"""

import gc
import json
import sys
from contextlib import contextmanager
from pathlib import Path

from torch.nn.modules.module import register_module_forward_hook
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from align.schemas.config import LoraOptions, TrainOptions
from align.stages.engine.distributed import joined_world
from align.stages.methods.table import METHODS
from support.listed_experts import train_listed
from support.method_steps import MPO
from support.rounding import EPSILON
from support.training_trouble import TROUBLE
from support.training_world import START, facts, job_of, learn

# Tokens per micro-batch that make one, about three, and eight of a step's eight rows.
BUDGETS = {"whole": 100_000, "thirds": 350, "rows": 1}
# A cache, a method, its options: these for ten steps, which are two epochs, all others for three.
KINDS = {
    "dpo": ("pairs", "dpo", {}),
    "kto": ("pairs", "kto", {}),
    "orpo": ("pairs", "orpo", {}),
    "kto-some": ("pairs", "kto", {"kl_per_step": 5}),
    "kto-all": ("pairs", "kto", {"kl_use": "all"}),
    "kto-classes": ("labels", "kto", {}),
}
SHORT = {
    **{f"table-{name}": ("everything", name, {}) for name in METHODS},
    "table-mixture": ("everything", MPO, {}),
    "table-wpo": ("everything", "dpo", {"wpo": True}),
    "experts": ("experts", "dpo", {}),
}
LEARNING = {"warmup": 0.0, "schedule": "constant", "eval_fraction": 0.2, "epsilon": EPSILON}
TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
EXPERTS = 16  # so many that a rank's rows leave some of them out

# What `make test` trains in one process and in two. Of the table one method for each kind of step:
# what is asked before a loss or remembered, and what is read of tokens, scores and labels.
TABLE = ("bco", "aot", "grpo", "ppo", "reward", "sft", "csft", "mixture", "wpo")
OTHER_KTO = ("kto-some", "kto-all", "kto-classes")
ALONE = (
    *(f"dpo/{cut}" for cut in ("whole/zero0", "thirds/zero0", "rows/zero0", "thirds/zero1")),
    *(f"kto/{cut}" for cut in ("whole/zero0", "rows/zero0", "thirds/zero2")),
    *(f"orpo/{cut}" for cut in ("whole/zero0", "thirds/zero0", "thirds/zero3")),
    *(f"{kind}/{cut}" for kind in OTHER_KTO for cut in ("whole/zero0", "rows/zero2")),
    *(f"table-{name}/{cut}/zero0" for name in TABLE for cut in ("whole", "thirds")),
    *(f"experts/whole/zero0{word}" for word in ("", "/free", "/adapted")),
    "experts/rows/zero0/recomputing",
    *TROUBLE,
)
SHARING = (
    "dpo/thirds/zero1/2",
    "orpo/thirds/zero2/2",
    "kto-all/rows/zero1/2",
    "table-reward/rows/zero1/2",
    "table-ppo/rows/zero1/2",
    "experts/thirds/zero1/2",
)
SPREAD = (
    *(f"dpo/thirds/zero{stage}" for stage in (0, 1, 2, 3)),
    *(f"kto/thirds/zero{stage}" for stage in (1, 3)),
    *(f"orpo/thirds/zero{stage}" for stage in (0, 2)),
    *(f"{kind}/rows/zero0" for kind in OTHER_KTO),
    *(f"table-{name}/rows/zero1" for name in TABLE),
    "experts/thirds/zero0",
    "experts/rows/zero1",
    "experts/thirds/zero3/recomputing",
    "experts/rows/zero3/adapted",
    *SHARING,
    "listed/own/zero0",
    "listed/own/zero3",
    *TROUBLE,
)


def run_case(world, name, caches):
    kind, budget, preset, *words = name.split("/")
    if kind == "listed":
        preset = str(Path(caches["experts"]).parent / f"{preset}.json")
        return train_listed(world, TrainOptions(dtype="float32", deepspeed=preset, epsilon=EPSILON))
    cache, method, options = (KINDS | SHORT)[kind]
    (shared,) = [int(word) for word in words if word.isdigit()] or [1]
    job = job_of(
        caches[cache],
        method,
        options=options,
        max_steps=10 if kind in KINDS else 3,
        tokens_per_batch=BUDGETS[budget],
        deepspeed=preset,
        sequence_parallel=shared,
        router_loss=0.5 if kind == "experts" and "free" not in words else 0.0,
        gradient_checkpointing="recomputing" in words,
        lora=LoraOptions(enabled="adapted" in words, rank=2, targets=TARGETS),
        **LEARNING,
    )
    with nearest_ties() as ties:
        session, recorded = learn(job, world)
    weights = session.engine.weights(trainable_only=True)
    with session.feed.steps(START.cursor) as batches:
        turns = [len(batch.own) for batch in batches]
    return {
        "steps": [facts(metrics) for _, metrics in recorded.steps],
        "evaluations": [facts(metrics) for _, metrics in recorded.evaluations],
        "samples": [[_plain(one) for one in samples] for samples in recorded.samples],
        "weights": {key: tensor.flatten().tolist() for key, tensor in weights.items()},
        "micro_batches": turns,
        "nearest_tie": min(ties, default=None),
    }


def _plain(samples):
    whose = [samples.row, samples.row_id, samples.role.name, samples.num_tokens]
    return [whose, [samples.logp, samples.reference_logp]]


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


def run_cases(caches, names):
    """What this rank saw in each case, as a file would hold it; and its number."""
    gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine
    try:
        with joined_world() as world:
            seen = {
                name: TROUBLE[name](world, caches["pairs"])
                if name in TROUBLE
                else run_case(world, name, caches)
                for name in names
            }
    finally:
        gc.unfreeze()
    return json.dumps(seen), world.rank


def main(folder, *words):
    caches = dict(word.split("=") for word in words if "=" in word)
    seen, rank = run_cases(caches, [word for word in words if "=" not in word])
    (Path(folder) / f"rank-{rank}.json").write_text(seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
