"""A plan of a training as text: whether it fits and what would, its work, memory and cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap

from ...schemas.errors import counted
from ...stages.engine.engine_memory import Elements
from ...stages.report.cache_tables import facts, grid, heading
from .memory_choice import amount
from .memory_plan import Components, Way
from .memory_search import Tried
from .remedies import flags_of
from .run_plan import RunPlan
from .workload import Workload

GIB = 2**30
COLUMNS = ("weights", "gradients", "optimizer", "activations", "head", "masks", "buffers")
WIDTH = 80


def plan_text(plan: RunPlan) -> str:
    """All of it, in lines of 80 columns unless a path or the flags to copy are longer."""
    micro = f"{plan.workload.micro_tokens:,} tokens in a micro-batch"
    blocks = [
        list(_verdict(plan)),
        *([_wrapped(plan.note)] if plan.note else []),
        [_heading("Training"), *_facts(_training(plan))],
        [_heading("Stage 1"), *_facts(_stage_one(plan))],
        [_heading(f"Memory of {_whose(plan.device)} at its peak, in GiB"), *_parts(plan)],
        [_heading(f"Other ways, {micro}, in GiB"), *_ways(plan)],
        [_heading("With a reference beside the policy"), *_facts(_reference(plan))],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _whose(device: str) -> str:
    return "one GPU" if device == "cuda" else "each process"


def _heading(title: str) -> str:
    return heading(title)[:WIDTH]


def _facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    lines = [
        (name if not index else "", line)
        for name, value in pairs
        for index, line in enumerate(_wrapped(value, WIDTH - 16))
    ]
    return facts(lines)


def _wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Lines of words; a path that is longer than a line stays whole, to be copied."""
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _verdict(plan: RunPlan) -> Iterator[str]:
    """Whether it fits, and the flags to copy if it does not."""
    budget, needs = plan.choice.budget, amount(plan.own.peak)
    if not budget.size:
        yield from _wrapped(
            f"Needs {needs} on each rank. Pass --gpu 24g (48g, 80g) to be told whether that "
            "fits, and what would."
        )
        return
    verdict = "Does not fit" if plan.remedy else "Fits"
    yield from _wrapped(f"{verdict}: needs {needs} of the {budget}.")
    if plan.choice.found.changes:
        yield from _chosen_lines(plan)
    if plan.remedy:
        yield from _remedy_lines(plan, plan.remedy)


def _chosen_lines(plan: RunPlan) -> Iterator[str]:
    """What a training chooses by itself, with the flags that say the same."""
    found = plan.choice.found
    yield from _wrapped(
        f"Chosen, since {amount(plan.choice.given.components.peak)} would be needed without: "
        f"{found.attempt}. A training does so by itself; the same as flags:"
    )
    yield from ("", f"  {flags_of(found.changes, plan.given_by_set)}")
    if more := [*plan.choice.advice()]:
        yield ""
        for line in more:
            yield from _wrapped(f"{line[:1].upper()}{line[1:]}.")


def _remedy_lines(plan: RunPlan, remedy: Tried) -> Iterator[str]:
    peak, flags = remedy.components.peak, flags_of(remedy.changes, plan.given_by_set)
    if plan.fits(remedy.components):
        yield from _wrapped(f"Fits with {amount(peak)}: {remedy.attempt}. Add:")
    elif flags:
        yield from _wrapped(
            f"Nothing tried fits. {amount(peak - plan.choice.budget.usable)} too large is the "
            f"nearest: {remedy.attempt}. Use larger GPUs or more of them, or a smaller model. Its "
            "flags:"
        )
    else:
        yield from _wrapped("Nothing takes less: use larger GPUs, or a smaller model.")
        return
    yield from ("", f"  {flags}")


def _training(plan: RunPlan) -> Iterator[tuple[str, str]]:
    work = plan.workload
    yield "method", plan.method
    yield "policy", plan.policy
    yield "", f"{parameters_text(plan.elements)}, {plan.dtype}"
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
    epochs = f"{work.epochs:,.15g} {'epoch' if work.epochs == 1 else 'epochs'}"
    return f"{counted(work.steps, 'steps')} of {work.batch_size:,} rows, {epochs}"


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
    return f"{work.micro_batches:,} in a step of each rank, at most {work.micro_tokens:,} tokens"


def _stage_one(plan: RunPlan) -> Iterator[tuple[str, str]]:
    own, mismatched = plan.rows.own_tokens, plan.rows.mismatched_tokens
    yield "tokens", f"{own:,} of prompts and completions"
    if mismatched:
        share = mismatched / (own + mismatched)
        yield "KL pairs", f"{mismatched:,} tokens more, {share:.0%} of stage 1, for KTO's KL term"
        yield "", "no other method reads them; without: align precompute-ref … --kl-pairs 0"
    else:
        yield "KL pairs", "none: a cache without them serves every method but KTO's"


def _parts(plan: RunPlan) -> list[str]:
    """The components of the settings, beside those of the flags to copy."""
    shown = {str(plan.own_way): plan.own}
    if plan.choice.found.changes:
        shown = {"without": plan.choice.given.components, "chosen": plan.own}
    if plan.remedy and plan.remedy.changes:
        shown = {"as given": plan.own, "with flags": plan.remedy.components}
    names = {**{name: name for name in COLUMNS}, "peak": "peak", "host": "on the CPU"}
    rows = [
        [title, *(gib(getattr(one, name)) for one in shown.values())]
        for name, title in names.items()
    ]
    return grid(("", *shown), rows)


def _ways(plan: RunPlan) -> list[str]:
    """The peak of every way, with activations kept and with recomputed ones."""
    is_sized, peaks = bool(plan.choice.budget.size), dict(plan.memory)
    names = {"kept": False, "recomputed": True}
    head = [part for name in names for part in ((name, "fits") if is_sized else (name,))]
    rows = []
    for learning, deepspeed in dict.fromkeys((way.learning, way.deepspeed) for way in peaks):
        pair = [peaks.get(Way(learning, deepspeed, kind)) for kind in names.values()]
        is_own = (learning, deepspeed) == (plan.own_way.learning, plan.own_way.deepspeed)
        cells = [cell for one in pair for cell in _cells(plan, one)]
        host = max(one.host for one in pair if one)
        way = Way(learning, deepspeed, checkpointing=False)
        rows.append([f"{'> ' if is_own else '  '}{way}", *cells, gib(host)])
    return grid(("activations", *head, "on the CPU"), rows)


def _cells(plan: RunPlan, one: Components | None) -> list[str]:
    peak = gib(one.peak) if one else "-"
    if not plan.choice.budget.size:
        return [peak]
    return [peak, "-" if one is None else "yes" if plan.fits(one) else "no"]


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:,.1f}" if size >= 0.05 * GIB or not size else f"{size / GIB:.2f}"


def _reference(plan: RunPlan) -> Iterator[tuple[str, str]]:
    reference, own = plan.reference, plan.own.peak
    if reference.copy:
        yield "its weights", f"{gib(reference.copy)} GiB more: {gib(own + reference.copy)} GiB"
    else:
        yield "its weights", "none: the policy with its adapter switched off"
    both = own + reference.copy + reference.logits
    yield "logits", f"{gib(reference.logits)} GiB more without a fused head: {gib(both)} GiB"
