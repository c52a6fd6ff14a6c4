"""What goes wrong on one rank while all of them train, and what each rank makes of it."""

import hashlib
import math
import time
from functools import partial

import torch

from align.schemas.errors import CorruptionError, NonFiniteError
from align.stages.train.evaluation import EvalSamples, evaluate, whole_step
from align.stages.train.loop import train
from align.stages.train.synchronized import StopConditions, SynchronizedBatches, next_batch
from align.stages.train.throughput import Meter
from support.training_world import START, Recorded, job_of, loop_of, session_of

# Single ones, two in a row, and at last as many in a row as are borne.
WRONG = {2, 4, 5, 7, 8, 9}
NEVER = StopConditions(lambda: False, math.inf)
KINDS = {
    "loss": ("dpo", "zero2"),
    "gradient": ("dpo", "zero0"),
    "infinite gradient": ("dpo", "zero3"),
    "mismatched": ("kto", "zero1"),
}


class Spoiled:
    """An engine that gives one wrong answer in each wrong step: its last rank's first one."""

    def __init__(self, engine, kind):
        self._engine, self._kind = engine, kind
        self._step = 0
        self._is_next = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def set_lr(self, lr):
        """The loop does it once at the start of each step."""
        self._step += 1
        is_last = self._engine.world.rank == self._engine.world.size - 1
        self._is_next = is_last and self._step in WRONG
        self._engine.set_lr(lr)

    def forward(self, trees):
        return {"logps": self._spoilt(self._engine.forward(trees)["logps"])}

    def _spoilt(self, logps):
        if not self._is_next or torch.is_grad_enabled() == (self._kind == "mismatched"):
            return logps
        self._is_next = False
        if "gradient" not in self._kind:
            return logps * math.nan
        factor = math.inf if "infinite" in self._kind else math.nan
        logps.register_hook(lambda gradient: gradient * factor)
        return logps


def nonfinite(world, pairs, kind):
    """Trains until too many steps in a row have failed."""
    method, preset = KINDS[kind]
    settings = {"deepspeed": preset, "tokens_per_batch": 1, "nonfinite_limit": 3}
    session = session_of(job_of(pairs, method, **settings), world)
    digests, recorded = [digest(session.engine)], Recorded()
    recorded.on_step = lambda _: digests.append(digest(session.engine))
    loop = loop_of(session)
    loop.engine = Spoiled(session.engine, kind)
    error = ""
    try:
        train(loop, start=START, records=recorded, conditions=NEVER)
    except NonFiniteError as raised:
        error = f"{raised.exit_code}: {raised}"
    with session.feed.steps(START.cursor) as batches:
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
    """Of all weights; of nothing but on the first rank."""
    whole = hashlib.sha256()
    for tensor in engine.weights().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def stop_reasons(world, pairs):
    """Reasons to stop that only the last rank has."""
    session = session_of(job_of(pairs, "dpo", max_steps=6), world)
    is_last = world.rank == world.size - 1
    late = time.monotonic() - 1 if is_last else math.inf
    reasons = {
        "signal": StopConditions(lambda: is_last, math.inf),
        "time": StopConditions(lambda: False, late),
        "both": StopConditions(lambda: is_last, late),
        "none": NEVER,
    }
    seen = {name: asked(session, one) for name, one in reasons.items()}
    recorded = Recorded()
    stopped = StopConditions(lambda: is_last and len(recorded.steps) == 3, math.inf)
    place, ending = train(loop_of(session), start=START, records=recorded, conditions=stopped)
    seen["in the middle"] = [place.step, place.cursor.step, ending, recorded.saves]
    failures = {
        "failure": failure(session, is_last),
        "failed evaluation": failed_evaluation(session, is_last),
    }
    return seen | failures


def asked(session, conditions):
    with session.feed.steps(START.cursor) as batches:
        return next_batch(session.engine, batches, Meter(pads=False), conditions)[1]


def failure(session, is_last):
    """What each rank says when the last one cannot read its rows."""
    with session.feed.steps(START.cursor) as batches:
        try:
            next_batch(session.engine, damaged() if is_last else batches, Meter(pads=False), NEVER)
        except CorruptionError as error:
            return str(error)


def failed_evaluation(session, is_last):
    """What each rank says when the last one cannot read a held-out row."""
    with session.feed.steps(START.cursor) as stream:
        batches = SynchronizedBatches(
            session.engine, damaged() if is_last else stream, Meter(pads=False), NEVER
        )
        samples = EvalSamples(most_rows=0, keeps_ids=False)
        engine, recipe = session.engine, session.recipe
        step = whole_step(engine, recipe, (), session.feed.held_out_size())
        try:
            evaluate(engine, recipe, batches, step=step, state={}, samples=samples)
        except CorruptionError as error:
            return str(error)


def damaged():
    raise CorruptionError("part-3 is damaged")
    yield


TROUBLE = {
    **{f"nonfinite {kind}": partial(nonfinite, kind=kind) for kind in KINDS},
    "stop reasons": stop_reasons,
}
