"""A rank of a test world trains in micro-batches and on several ranks, and meets trouble.

A case is KIND/MICRO-BATCHES/PRESET and words. The folder of the launch holds its caches by their
names.
"""

import hashlib
import math
import time
from contextlib import contextmanager
from copy import copy

import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from align.schemas.errors import CorruptionError, NonFiniteError
from align.schemas.train_options import LoraOptions
from align.stages.methods.table import METHODS
from align.stages.train.together import Meter, StopConditions, Together
from support.forked_ranks import device_of_ranks
from support.method_steps import MPO
from support.rounding import EPSILON
from support.training_world import Recorded, facts, job_of, learn, session_of, through

# Tokens per micro-batch that make one, three, and five of a step's five rows.
BUDGETS = {"whole": 100_000, "thirds": 250, "rows": 1}
# A cache, a method, its options. There is one method for each kind of step: what it computes before
# the loss, what it keeps, and what it reads of tokens, scores and labels.
KINDS = {
    "dpo": ("pairs", "dpo", {}),
    "kto": ("pairs", "kto", {}),
    "kto-all": ("pairs", "kto", {"kl_use": "all"}),
    "kto-some": ("pairs", "kto", {"kl_per_step": 5}),
    "kto-classes": ("labels", "kto", {}),
    **{f"table-{name}": ("everything", name, {}) for name in METHODS},
    "table-mixture": ("everything", MPO, {}),
    "table-wpo": ("everything", "dpo", {"wpo": True}),
    "experts": ("experts", "dpo", {}),
    "continued": ("continued", "dpo", {}),
}
STEPS = {"kto": 4}  # two epochs, with other partners in the second; all others take 3
LEARNING = {
    "warmup": 0.0,
    "schedule": "constant",
    "batch_size": 5,
    "limit_eval_batches": 2,
    "eval_fraction": 0.8,  # of 54 rows 13 are left to learn from, three steps an epoch
    "epsilon": EPSILON,
}
TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
EXPERTS = 16  # so many that a rank's rows leave some of them out

# What `make test` trains.
TABLE = tuple(f"table-{name}" for name in ("bco", "aot", "grpo", "ppo", "reward", "mixture", "wpo"))
ALONE = (
    *(f"{kind}/whole/zero0" for kind in ("dpo", "kto", "kto-all", *TABLE)),
    *("dpo/rows/zero1", "kto/thirds/zero2"),
    *(f"experts/whole/zero0{word}" for word in ("", "/free", "/adapted")),
    "continued/whole/zero0",
)
SPREAD = (
    *("dpo/thirds/zero3", "kto/thirds/zero2", "table-ppo/thirds/zero3"),
    *(f"table-{name}/rows/zero1" for name in ("bco", "aot", "grpo", "mixture", "wpo")),
    *("experts/thirds/zero1/recomputing", "experts/thirds/zero3/adapted"),
    *("kto-all/thirds/zero1", "table-reward/rows/zero1"),
    *("continued/thirds/zero2", "continued/rows/zero3"),
)
# What `make test-long` trains besides.
OTHERS = tuple(kind for kind in KINDS if f"{kind}/whole/zero0" not in ALONE)
# On the pretended device one method for each kind of loss; every layout of a GPU, way to load a
# policy, head and modifier with some of them.
DEVICES = (
    *(f"device/{name}/flex/plain" for name in ("bco", "ppo", "dpo-weighed")),
    *("device/aot/tree/plain", "device/mixture/tree/plain", "device/kto-clamped/plain/plain"),
    "device/cdpo-wpo/plain/plain",
    *("device/orpo/flex/lora", "device/csft/plain/lora", "device/reward/tree/bf16"),
    *("device/grpo/tree/dropout", "device/activations"),
)


def trained(kind, world, folder, budget, preset, *words):
    """The results of a training on this rank."""
    cache, method, options = KINDS[kind]
    job = job_of(
        folder / cache,
        method,
        options=options,
        device=device_of_ranks(),
        max_steps=STEPS.get(kind, 3),
        tokens_per_batch=BUDGETS[budget],
        deepspeed=preset,
        router_loss=0.5 if kind == "experts" and "free" not in words else 0.0,
        gradient_checkpointing="recomputing" in words,
        lora=LoraOptions(enabled="adapted" in words, rank=2, targets=TARGETS),
        **LEARNING,
    )
    with nearest_ties() as ties:
        session, recorded = learn(job, world)
    weights = session.engine.weights(trainable_only=True)
    with session.feed.steps(0) as batches:
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
    """The lead of the last chosen expert over the next one, for each router and pass."""
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


# Single ones, two in a row, and at last as many in a row as end the run.
WRONG = [2, 4, 5, 7, 8, 9]
TROUBLE = {
    "loss": ("dpo", "zero2"),
    "infinite gradient": ("dpo", "zero0"),
    "mismatched": ("kto", "zero1"),
}


class Spoiled:
    """An engine whose last rank gives one wrong output at the start of each wrong step."""

    def __init__(self, engine, kind):
        self._engine, self._kind = engine, kind
        self._step = 0
        self._is_next = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def set_lr(self, lr):
        """The loop calls it once at the start of each step."""
        self._step += 1
        self._is_next = is_last(self._engine.world) and self._step in WRONG
        self._engine.set_lr(lr)

    def forward(self, trees):
        logps = self._engine.forward(trees)["logps"]
        is_asked = torch.is_grad_enabled() != (self._kind == "mismatched")
        if self._is_next and is_asked:
            self._is_next = False
            if "gradient" not in self._kind:
                return {"logps": logps * math.nan}
            logps.register_hook(lambda gradient: gradient * math.inf)
        return {"logps": logps}


def is_last(world):
    return world.rank == world.size - 1


def nonfinite(world, folder, kind):
    """Trains until too many steps in a row have failed."""
    method, preset = TROUBLE[kind]
    settings = {"deepspeed": preset, "batch_size": 4, "tokens_per_batch": 1}
    settings["nonfinite_limit"] = 3
    session = session_of(job_of(folder / "pairs", method, **settings), world)
    digests, recorded = [digest(session.engine)], Recorded()
    recorded.on_step = lambda _: digests.append(digest(session.engine))
    session.engine = Spoiled(session.engine, kind)
    error = ""
    try:
        through(session, recorded=recorded)
    except NonFiniteError as raised:
        error = f"{raised.exit_code}: {raised}"
    with session.feed.steps(0) as batches:
        every = list(batches)
    return {
        "digests": [*digests, digest(session.engine)],
        "refused": recorded.refused,
        "losses": [metrics.get("loss", math.nan) for _, metrics in recorded.steps],
        "firsts": [batch.own[0].row_ids for batch in every],
        "first_mismatched": [micro.row_ids for batch in every for micro in batch.mismatched[:1]],
        "rows": [batch.rows for batch in every],
        "error": error,
    }


def digest(engine):
    """The digest of all weights on the first rank, and of nothing on the others."""
    whole = hashlib.sha256()
    for tensor in engine.weights().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def stop_reasons(world, folder):
    """How each rank ends for a reason that only the last one has."""
    job = job_of(folder / "pairs", "dpo", max_steps=6, eval_fraction=0.2)
    session = session_of(job, world)
    asks = is_last(world)
    late = time.monotonic() - 1 if asks else math.inf
    reasons = {
        "signal": StopConditions(lambda: asks, late),
        "time": StopConditions(deadline=late),
        "none": StopConditions(),
    }
    seen = {}
    with session.feed.steps(0) as batches:
        for name, one in reasons.items():
            together = Together(session.engine, batches, Meter(pads=False), one)
            next(together, None)
            seen[name] = together.ending
    recorded = Recorded()
    stopped = StopConditions(lambda: asks and len(recorded.steps) == 3)
    _, place, ending = through(session, recorded=recorded, stop=stopped)
    seen["in the middle"] = [place.step, ending, recorded.saves]
    for source in ("steps", "held_out"):
        other = copy(session)
        other.feed = Damaged(session.feed, source) if asks else session.feed
        try:
            through(other)
        except CorruptionError as error:
            seen[source] = str(error)
    return seen


class Damaged:
    """A feed with one source that cannot be read."""

    def __init__(self, feed, source):
        self._feed, self._source = feed, source

    def __getattr__(self, name):
        return self.nothing if name == self._source else getattr(self._feed, name)

    @contextmanager
    def nothing(self, *_):
        def damaged():
            raise CorruptionError("part-3 is damaged")
            yield

        yield damaged()
