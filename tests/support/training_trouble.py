"""What goes wrong on one rank while all of them train, and what each rank makes of it."""

import hashlib
import math
import time
from contextlib import contextmanager
from copy import copy

import torch

from align.schemas.errors import CorruptionError, NonFiniteError
from align.stages.train.together import Meter, StopConditions, Together
from support.training_world import Recorded, job_of, session_of, through

# Single ones, two in a row, and at last as many in a row as are borne.
WRONG = [2, 4, 5, 7, 8, 9]
KINDS = {
    "loss": ("dpo", "zero2"),
    "infinite gradient": ("dpo", "zero0"),
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
    method, preset = KINDS[kind]
    settings = {"deepspeed": preset, "tokens_per_batch": 1, "nonfinite_limit": 3}
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
    """Of all weights; of nothing but on the first rank."""
    whole = hashlib.sha256()
    for tensor in engine.weights().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def stop_reasons(world, folder):
    """What each rank makes of reasons to stop that only the last one has."""
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
    """A feed of whose one source no row can be read."""

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
