"""`align plan`: the work of a training, its memory on each rank, and its command.

The plan follows from the settings, config.json, and a cache's or given lengths; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap

from ...schemas.cache import reference_named
from ...schemas.errors import UsageError, counted
from ...stages.engine.deepspeed_config import PRESETS
from ...stages.model.load import chosen_device, device_bytes
from ...stages.model.model_folder import require_peft
from ...stages.report.text_tables import facts as named
from ...stages.report.text_tables import grid, heading
from ..options.first_checks import asked_objective
from ..options.settings import BY_HAND, Settings, flatten, without_secrets
from ..options.settings_table import as_flags, reads
from .cache_checks import misfit_note
from .memory import (
    INPUTS,
    RECOMPUTE,
    ZERO,
    Budget,
    Changes,
    Choice,
    PlanFacts,
    Planned,
    amount,
    chosen,
    host_bytes,
    measured_policy,
    planned,
)
from .setting_checks import learning_rate_note, require_effect, with_adapters_settings
from .workload import (
    GivenRows,
    PlannedRows,
    gib,
    known_dtype,
    micro_batches_text,
    parameters_text,
    planned_rows,
    steps_text,
    tokens_text,
)

WIDTH = 80
COLUMNS = ("weights", "gradients", "optimizer", "activations", "head", "buffers", "process")


@dataclass(frozen=True)
class RunPlan:
    """A training that has not started."""

    settings: Settings
    facts: PlanFacts
    rows: PlannedRows
    choice: Choice
    misfit: str = ""  # the reason for which training would refuse the cache

    @property
    def own(self) -> Planned:
        """The plan of these settings."""
        return self.choice.found

    @property
    def best(self) -> Planned:
        """The plan that fits, or comes nearest, if these settings do not fit."""
        return self.choice.advice or self.choice.nearest


def plan_run(
    settings: Settings,
    *,
    gpu_bytes: int = 0,
    ranks: int = 1,
    is_for_gpu: bool = False,
    given: GivenRows | None = None,
) -> RunPlan:
    """Plans the training of these settings, for the given GPU or this machine's device."""
    config = settings.config
    objective = asked_objective(config)
    require_effect(settings)
    device = "cuda" if is_for_gpu else chosen_device(config.model)
    rows = planned_rows(config, objective, given)
    config = with_adapters_settings(settings, objective, rows.policy.adapter)
    if config.lora.enabled:
        require_peft()
    facts = PlanFacts(
        rows.policy,
        known_dtype(rows.policy.path, config.train.dtype),
        objective,
        rows.table,
        rows=rows.count,
        held_out=rows.held_out,
        device=device,
        ranks=ranks,
        budget=Budget.of(config.train, gpu_bytes or (0 if is_for_gpu else device_bytes(device))),
        host=0 if is_for_gpu else host_bytes() // ranks,
    )
    misfit = ""
    if rows.manifest and config.train.model:
        needs_reference = "reference" in objective.needs
        misfit = misfit_note(
            settings, rows.manifest, rows.policy.path, needs_reference=needs_reference
        )
    return RunPlan(settings, facts, rows, chosen(config, facts), misfit)


def plan_text(plan: RunPlan) -> str:
    """The result, the work, the memory, the alternatives, and the command to copy."""
    choice, best = plan.choice, plan.best
    device = "one GPU" if plan.facts.device == "cuda" else "each process"
    blocks = [
        [*_verdict(plan), *filter(None, [plan.misfit])],
        wrap(learning_rate_note(best.config.train, best.config.lora), WIDTH),
        [heading("Training")[:WIDTH], *named([*_work(plan)])],
        [heading(f"Memory of {device} at its peak, in GiB")[:WIDTH], *_components(plan)],
        [heading("Other ways, with these micro-batches, in GiB")[:WIDTH], *_ways(plan)],
        [f"Run it{'' if choice.fits else ', changed to fit or come nearest'}:"],
        [command(plan)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _verdict(plan: RunPlan) -> Iterator[str]:
    """A sentence on whether the training fits, with settings that do if it does not."""
    choice, needs = plan.choice, amount(plan.own.estimate.peak)
    where = f"on {counted(plan.facts.ranks, 'ranks')} of {plan.facts.device}"
    if not choice.budget.size:
        yield f"Needs {needs}, {where}; pass --gpu 24g or --memory 24g to compare with a size."
        return
    yield f"{'Fits' if choice.fits else 'Does not fit'}: {needs} of the {choice.budget}, {where}."
    if choice.fits and choice.found.changes:
        without = amount(choice.given.estimate.peak)
        flags = as_flags(choice.found.changes, "train")
        yield from wrap(f"auto chooses {flags}; without it, {without} would be needed.", WIDTH)
    if not choice.fits:
        for line in choice.what_else():
            yield from wrap(line, WIDTH, break_on_hyphens=False)


def _work(plan: RunPlan) -> Iterator[tuple[str, str]]:
    own, facts = plan.own, plan.facts
    work, rows = own.workload, plan.rows
    elements = measured_policy(own.config, facts, work.row).elements(own.config.lora.quantize)
    yield "method", facts.objective.name
    yield "policy", reference_named(rows.policy.path, rows.policy.adapter)
    yield "", f"{parameters_text(elements)}, {facts.dtype}"
    yield "rows", f"{work.rows:,} to learn from, {work.held_out:,} held out"
    if not rows.manifest:
        prompt, completion = work.row.prompt, work.row.completions[0]
        yield "", f"assumed: {prompt:,} tokens in a prompt, {completion:,} in a completion"
    yield "steps", steps_text(work)
    yield "tokens", tokens_text(work)
    yield "a step", micro_batches_text(work)
    yield "stage 1", f"{rows.own_tokens:,} tokens of prompts and completions"
    if rows.mismatched_tokens:
        share = rows.mismatched_tokens / (rows.own_tokens + rows.mismatched_tokens)
        yield "KL completions", f"{rows.mismatched_tokens:,} more ({share:.0%}), read only by KTO"
        if "mismatched" not in facts.objective.needs:
            yield "", "without them: align precompute-ref … --kl-pairs 0"


def _components(plan: RunPlan) -> list[str]:
    """The components of the peak, for the settings and for the chosen or advised ones."""
    shown = {"as given": plan.choice.given}
    if plan.choice.fits and plan.own.changes:
        shown["chosen"] = plan.own
    if not plan.choice.fits and plan.best.changes:
        shown["changed"] = plan.best
    names = {**{name: name for name in COLUMNS}, "peak": "peak", "host": "on the CPU"}
    rows = [
        [title, *(gib(getattr(one.estimate, name)) for one in shown.values())]
        for name, title in names.items()
    ]
    return grid(("", *shown), rows)


def _ways(plan: RunPlan) -> list[str]:
    """The peak of each ZeRO stage and kind of adapter, with activations kept or recomputed."""
    ways: dict[str, Changes] = {
        "": {"lora.enabled": False, "lora.quantize": "none"},
        ", lora": {"lora.enabled": True, "lora.quantize": "none"},
        ", qlora": {"lora.enabled": True, "lora.quantize": "nf4"},
    }
    budget = plan.choice.budget
    rows: list[list[str]] = []
    for name, adapter in ways.items():
        for preset, zero in PRESETS.items():
            if name == ", qlora" and zero.stage == 3:  # ZeRO-3 cannot shard quantized weights
                continue
            cells: list[str] = []
            host = 0
            for recomputes in (False, True):
                changes = adapter | {ZERO: preset, RECOMPUTE: recomputes, INPUTS: False}
                try:
                    found = planned(plan.own.config, plan.facts, changes).estimate
                except UsageError:
                    cells += ["-", *([""] if budget.size else [])]
                    continue
                host = max(host, found.host)
                verdict = ["yes" if budget.holds(found) else "no"] if budget.size else []
                cells += [gib(found.peak), *verdict]
            rows.append([f"{preset}{name}", *cells, gib(host)])
    fits = ["fits"] if budget.size else []
    return grid(("activations", "kept", *fits, "recomputed", *fits, "on the CPU"), rows)


def command(plan: RunPlan) -> str:
    """The command of the training, with the decided or advised settings."""
    known, origins = without_secrets(flatten(plan.settings.config)), plan.settings.origins
    given = {
        name: known[name]
        for name, origin in origins.items()
        if origin in BY_HAND and origin != "ALIGN_MODEL" and reads("train", name)
    }
    by_set = {name for name, origin in origins.items() if origin == "--set"}
    flags = as_flags(given | plan.best.changes, "train", by_set)
    cache = "" if plan.rows.manifest else "--cache CACHE "
    ranks = plan.facts.ranks
    program = f"torchrun --nproc-per-node {ranks} -m align" if ranks > 1 else "align"
    return f"{program} train {cache}{flags}"
