"""A plan of a training as text: what it runs over, its memory on each GPU, time and cost."""

from __future__ import annotations

from collections.abc import Iterator

from ...schemas.errors import counted
from ...stages.engine.engine_memory import Elements
from ...stages.report.cache_tables import facts, grid, heading
from .run_plan import USABLE, RunPlan
from .workload import Workload

GIB = 2**30
HOUR = 3600
COLUMNS = ("weights", "gradients", "optimizer", "activations", "head", "masks", "buffers")
HEAD = ("", *COLUMNS, "peak", "on CPU")


def plan_text(plan: RunPlan) -> str:
    """All of it."""
    blocks = [
        [heading("Training"), *facts([*_training(plan), *_time(plan)])],
        [heading("Stage 1"), *facts(list(_stage_one(plan)))],
        [heading("Memory of one GPU at its peak, in GiB"), *_memory(plan)],
        [heading("With a reference beside the policy"), *facts(list(_reference(plan)))],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _training(plan: RunPlan) -> Iterator[tuple[str, str]]:
    work = plan.workload
    yield "method", plan.method
    yield "policy", f"{plan.policy}: {parameters_text(plan.elements)}, {plan.dtype}"
    yield "settings", f"{plan.own_way}, {counted(plan.request.gpus, 'ranks')} on {plan.device}"
    yield "rows", f"{work.rows:,} to learn from, {work.held_out:,} held out"
    yield "steps", steps_text(work)
    yield "tokens", tokens_text(work)
    yield "micro-batch", micro_batches_text(work)


def parameters_text(elements: Elements) -> str:
    """The number of parameters, and of trainable ones."""
    share = elements.learning / elements.total
    learn = "all learn" if not elements.frozen else f"{elements.learning:,} learn ({share:.2%})"
    return f"{elements.total:,} parameters, {learn}"


def steps_text(work: Workload) -> str:
    """The numbers of steps, rows and epochs."""
    steps, epochs = counted(work.steps, "steps"), counted(work.epochs, "epochs")
    return f"{steps} of {work.batch_size:,} rows, {epochs}"


def tokens_text(work: Workload) -> str:
    """The tokens that the policy runs over."""
    if not work.mismatched_tokens:
        return f"{work.learned_tokens:,}"
    return (
        f"{work.learned_tokens:,} to learn from, {work.mismatched_tokens:,} mismatched "
        "(KTO's KL term, without gradients)"
    )


def micro_batches_text(work: Workload) -> str:
    """The micro-batches of a step."""
    whose = f"{work.sharing} ranks together" if work.sharing > 1 else "each rank"
    return f"{work.micro_batches:,} in a step of {whose}, at most {work.micro_tokens:,} tokens"


def _time(plan: RunPlan) -> Iterator[tuple[str, str]]:
    if not plan.seconds:
        yield "time", "unknown: pass --tokens-per-second, or --like RUN to take it from a run"
        return
    hours, rate = plan.seconds / HOUR, plan.request.tokens_per_second
    yield "time", f"{_duration(plan.seconds)} at {rate:,.0f} tokens/s, without evaluations"
    if plan.request.price:
        paid = hours * plan.request.gpus
        cost = paid * plan.request.price
        yield "cost", f"{cost:,.2f}: {paid:,.1f} GPU hours at {plan.request.price:,.2f}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def _stage_one(plan: RunPlan) -> Iterator[tuple[str, str]]:
    scoring = plan.scoring
    yield "tokens", f"{scoring.own:,} of prompts and completions"
    if not scoring.mismatched:
        yield "KL pairs", "none: a cache without them serves every method but KTO's"
        return
    share = scoring.mismatched / (scoring.own + scoring.mismatched)
    yield (
        "KL pairs",
        f"{scoring.mismatched:,} tokens more, {share:.0%} of stage 1, for KTO's KL term",
    )
    yield "", "no other method reads them; without: align precompute-ref … --kl-pairs 0"


def _memory(plan: RunPlan) -> Iterator[str]:
    is_sized = bool(plan.request.gpu_bytes)
    head = (*HEAD, "fits") if is_sized else HEAD
    rows = []
    for way, one in plan.memory:
        mark = "> " if way == plan.own_way else "  "
        cells = [*(gib(getattr(one, name)) for name in COLUMNS), gib(one.peak), gib(one.host)]
        fits = ["yes" if plan.fits(one) else "no"] if is_sized else []
        rows.append([f"{mark}{way}", *cells, *fits])
    yield from grid(head, rows)
    if is_sized:
        yield ""
        yield f"  {_verdict(plan)}"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:,.1f}" if size >= 0.05 * GIB or not size else f"{size / GIB:.2f}"


def _verdict(plan: RunPlan) -> str:
    size = plan.request.gpu_bytes
    usable = f"{gib(USABLE * size)} that can be used ({USABLE:.0%} of {gib(size)})"
    needs = f"{plan.own_way} needs {gib(plan.own.peak)} GiB of {usable}"
    if plan.fits(plan.own):
        return f"Fits: {needs}."
    way = plan.nearest_that_fits()
    if way is None:
        return f"Does not fit: {needs}. Nothing in the table does: use more or larger GPUs."
    return f"Does not fit: {needs}. Fits with {way}."


def _reference(plan: RunPlan) -> Iterator[tuple[str, str]]:
    reference, own = plan.reference, plan.own.peak
    if reference.copy:
        yield "its weights", f"{gib(reference.copy)} GiB more: {gib(own + reference.copy)} GiB"
    else:
        yield "its weights", "none: the policy with its adapter switched off"
    both = own + reference.copy + reference.logits
    yield "logits", f"{gib(reference.logits)} GiB more without a fused head: {gib(both)} GiB"
