"""Whether a run may go on from what its folder holds."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from ..schemas.errors import CorruptionError, FingerprintError, UsageError
from ..schemas.safe_text import masked
from ..stages.storage import fs
from ..stages.storage.run_folder import begins_as
from .run_identity import CHANGES_LENGTH, binding, identity_of, job_settings, made_with

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schemas.batches import World
    from ..schemas.checkpoint import Position, RunIdentity
    from ..stages.storage.run_folder import RunFolder
    from .session import Session
    from .training_job import TrainingJob

logger = logging.getLogger("align")


def require_same_settings(begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses other settings than those of a config.yaml, where no checkpoint says more."""
    _require_same(binding(begun), binding(now))


def require_same_run(
    begun: RunIdentity, job: TrainingJob, world: World, *, where: str
) -> list[str]:
    """Refuses what would make another run of it; returns what was changed of its length."""
    if begun.cache_root != job.manifest.root:
        raise FingerprintError(
            f"The run was begun on the cache {begun.cache_root[:12]}…, and this one is "
            f"{job.manifest.root[:12]}…. Pass the --cache it was begun with, or begin a new run."
        )
    changed = _require_same(begun.settings, job_settings(job))
    zero_stage = job.zero_stage(world.size)
    if (begun.world_size, begun.zero_stage) != (world.size, zero_stage):
        raise UsageError(
            f"{where} was saved by {begun.world_size} rank(s) under ZeRO {begun.zero_stage}; this "
            f"is {world.size} under ZeRO {zero_stage}. Go on with as many ranks and the same stage."
        )
    return changed


def require_same_computing(begun: Position, session: Session) -> tuple[str, ...]:
    """Refuses a loaded policy that computes otherwise; returns what differs and may differ."""
    _require_same(begun.identity.computed, identity_of(session).computed)
    was, is_now = begun.made_with, made_with(session)
    changed = tuple(
        f"after step {begun.global_step}: {name} {was.get(name, 'none')} → {now}"
        for name, now in is_now.items()
        if was.get(name, "none") != now
    )
    if changed and session.world.rank == 0:
        listed = "\n  ".join(changed)
        logger.warning(
            "This run goes on with other parts than it was begun with:\n  %s\nIt does not end in "
            "the bits that it would have ended in with the first ones.",
            listed,
        )
    return changed


def require_whole_records(folder: RunFolder, position: Position) -> tuple[str, ...]:
    """Refuses a metrics.jsonl that is not what it was at the checkpoint; one that is gone is said.

    Returns what is missing.
    """
    known = position.journal
    if not folder.metrics.exists() and known.bytes:
        missing = f"{folder.metrics.name} was gone after step {position.global_step}"
        logger.warning(
            "%s is gone: what was measured up to step %d is lost. The run goes on, and a new file "
            "begins after that step.",
            folder.metrics,
            position.global_step,
        )
        return (missing,)
    if known.bytes and not begins_as(folder.metrics, known):
        raise CorruptionError(
            f"{folder.metrics} does not begin with the {known.bytes:,} bytes that it had at the "
            f"checkpoint of step {position.global_step}: it was cut, edited or damaged. Restore "
            "it, or remove it to go on without what was measured before."
        )
    return ()


def require_same_engine_file(folder: RunFolder, text: bytes) -> None:
    """Refuses a deepspeed.json other than the one that the checkpoint's run would write."""
    if folder.engine.exists() and fs.read_bytes(folder.engine) != text:
        raise CorruptionError(
            f"{folder.engine} is damaged or was edited: this run was given another one. Remove it: "
            "it is written anew, from what the checkpoint says."
        )


def engine_text(config: dict[str, Any]) -> bytes:
    """What deepspeed.json holds."""
    return f"{json.dumps(masked(config), indent=2, sort_keys=True, default=str)}\n".encode()


def _require_same(begun: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names each value that differs; returns those that only set the length."""
    changed = sorted(name for name in {*begun, *now} if begun.get(name) != now.get(name))
    lines = {
        name: f"{name}: begun with {_shown(begun, name)}, now {_shown(now, name)}"
        for name in changed
    }
    if wrong := [lines[name] for name in changed if name not in CHANGES_LENGTH]:
        listed = "\n  ".join(wrong)
        raise FingerprintError(
            f"This run was begun with other settings. What differs:\n  {listed}\n"
            "Undo the change, or begin a new run in another --output."
        )
    return list(lines.values())


def _shown(settings: Mapping[str, str], name: str) -> str:
    """Not all of a long digest; another method has other options."""
    value = settings.get(name, "nothing")
    return f"{value[:12]}…" if len(value) == 64 else value
