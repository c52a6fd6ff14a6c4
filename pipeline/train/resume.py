"""Starts or resumes a run: its folder, its owner, its identity, and whether it may resume."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import __version__
from ...schemas.batches import World
from ...schemas.checkpoint import Checkpoint, FittedBatches, Position, RunIdentity
from ...schemas.errors import FingerprintError, StorageError, UsageError
from ...schemas.safe_text import masked
from ...stages.engine.deepspeed_config import leaves, stage_of
from ...stages.engine.distributed import gathered, run_on_all_ranks, run_on_rank_zero
from ...stages.model.logprobs import causal_model, own_attention
from ...stages.storage.disk import fs
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.run.checkpoints import CHECKPOINTS, damage, whole_checkpoints
from ...stages.storage.run.run_folder import RunFolder, forget_ending, read_ending
from ...stages.storage.run.run_remote import RunRemote, run_folder_of, run_remote_of
from ..jobs.differences import differences
from ..options.settings import as_absolute, as_yaml, read_yaml
from ..options.table import binds, bound

if TYPE_CHECKING:
    from .training_job import Session, TrainingJob

logger = logging.getLogger("align")

SHARED_SECONDS = 60.0  # in which a network file system has to show what another machine wrote


@dataclass(frozen=True)
class Start:
    """The run's folder and checkpoint as every rank starts with them."""

    folder: RunFolder
    run_id: str
    checkpoint: Checkpoint | None = None
    noted: FittedBatches | None = None  # by a rank whose memory ran out
    is_finished: bool = False  # nothing is left to do
    changes: tuple[str, ...] = ()  # differences from when the run began
    began: float = 0.0  # on this rank's monotonic clock
    remote: RunRemote | None = None  # where the folder is uploaded

    @property
    def checkpoint_step(self) -> int:
        """Optimizer steps done before; 0 for a new run."""
        return self.checkpoint.position.global_step if self.checkpoint else 0

    def fits(self, planned: int) -> int:
        """The micro-batch in tokens where memory ran out with the planned one before, else 0."""
        known = [self.noted, self.checkpoint.position.fitted if self.checkpoint else None]
        # Whoever asks for another size wants to know anew.
        return min((one.fits for one in known if one and one.planned == planned), default=0)


@contextmanager
def started(job: TrainingJob, world: World) -> Iterator[Start]:
    """Owns the run's folder while the block runs; rank zero does it for all ranks."""
    output = job.config.train.output
    folder, remote = run_folder_of(output), run_remote_of(output)
    began = time.monotonic()  # each machine counts from a moment of its own
    with ExitStack() as stack:
        if remote and (machines := len({*gathered(world, socket.gethostname())})) > 1:
            raise UsageError(
                f"{output}: the ranks are on {machines} machines, and checkpoints need a folder "
                "that all of them share. Choose an --output there, and upload it afterwards."
            )
        start = run_on_rank_zero(world, lambda: _enter(job, folder, stack))
        if not start.is_finished:
            run_on_all_ranks(world, lambda: require_shared(folder, start.run_id))
            if job.config.train.resume == "auto":
                start = _resumed(job, world, start)
        if remote and world.rank == 0:
            stack.enter_context(remote.pushed_at_end())
        yield replace(start, began=began, remote=remote)


def held_to_checkpoint(session: Session, start: Start) -> Start:
    """Refuses to resume with another policy or engine; then writes the run's settings."""
    world, folder = session.world, start.folder
    changes = start.changes
    if start.checkpoint:
        position = start.checkpoint.position
        changes += run_on_all_ranks(world, lambda: require_same_computing(position, session))

    def begin() -> None:
        forget_ending(folder)
        fs.unlink(folder.answers)  # of a policy that learns on from here
        fs.publish(folder.config, as_yaml(session.job.config).encode())
        fs.publish(folder.engine, engine_text(session.engine_config))

    run_on_rank_zero(world, begin)
    return replace(start, changes=changes)


def _enter(job: TrainingJob, folder: RunFolder, stack: ExitStack) -> Start:
    run_id = uuid.uuid4().hex[:12]
    folder.prepare()
    if job.config.train.resume == "auto" and _is_finished(job, folder):
        if folder.left_over():
            with owner_lock(folder, run_id):
                folder.sweep()
        return Start(folder, run_id, is_finished=True)
    stack.enter_context(owner_lock(folder, run_id))
    folder.sweep()
    if job.config.train.resume == "never":
        folder.require_new()
    return Start(folder, run_id)


def _resumed(job: TrainingJob, world: World, start: Start) -> Start:
    """The start with the checkpoint to resume from, if there is one that these settings match."""
    folder, checkpoint = start.folder, _whole_checkpoint(world, start.folder)

    def match() -> FittedBatches | None:
        if checkpoint:
            lines = require_same_run(checkpoint.position.identity, job)
            for name, line in lines.items():
                follows = "; the learning rate follows the new length from here on"
                logger.warning("%s%s.", line, follows if binds(name, "length") else "")
        elif folder.config.exists() and folder.metrics.exists():
            # No checkpoint is left, but the folder may be of a run with other settings.
            require_same_settings(read_yaml(folder.config), as_absolute(job.config))
        return folder.noted_fitting()

    noted = run_on_rank_zero(world, match)
    changes = checkpoint.position.changes if checkpoint else ()
    return replace(start, checkpoint=checkpoint, noted=noted, changes=changes)


def _whole_checkpoint(world: World, folder: RunFolder) -> Checkpoint | None:
    """The newest whole checkpoint; rank zero chooses, for ranks could see different ones."""
    candidates = whole_checkpoints(folder)
    while checkpoint := run_on_rank_zero(world, lambda: next(candidates, None)):
        path = folder.step(checkpoint.position.global_step)
        why = damage_on_ranks(world, path, checkpoint)
        if not why:
            return checkpoint
        if world.rank == 0:
            logger.warning("%s", CHECKPOINTS.damaged(path, why))
    return None


def damage_on_ranks(world: World, path: Path, checkpoint: Checkpoint) -> str:
    """The first damage of a checkpoint, of whose files each rank reads its share."""
    found = gathered(world, damage(path, checkpoint, world.rank, world.size))
    return next(filter(None, found), "")


def require_shared(folder: RunFolder, run_id: str) -> None:
    """Refuses a folder that is not the one that rank zero owns: all ranks save into one."""
    began = time.monotonic()
    while not _is_owned_by(folder, run_id):
        if time.monotonic() - began > SHARED_SECONDS:
            raise UsageError(
                f"{folder.root.resolve()} on {socket.gethostname()} is not the folder that rank 0 "
                "writes to. All ranks save into one: choose an --output on a file system that "
                "every machine sees under the same path."
            )
        time.sleep(0.2)


def _is_owned_by(folder: RunFolder, run_id: str) -> bool:
    try:
        return run_id.encode() in fs.read_bytes(folder.lock)
    except StorageError:  # a network file system may show a new file late
        return False


def _is_finished(job: TrainingJob, folder: RunFolder) -> bool:
    """Whether there is a model already that these settings would make."""
    ending = read_ending(folder)
    if ending is None or ending.ending != "finished":
        return False
    if require_same_run(ending.identity, job):
        return False
    lacks_merged = job.config.lora.merge and not folder.merged.exists()
    return folder.model.exists() and not lacks_merged


def require_same_settings(begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses settings other than those of config.yaml, for a run without a checkpoint."""
    _require_same(binding(begun), binding(now))


def require_same_run(begun: RunIdentity, job: TrainingJob) -> dict[str, str]:
    """Refuses settings that make it another run; returns changes of its length and its end."""
    if begun.cache_root != job.manifest.root:
        raise FingerprintError(
            f"The run was begun on the cache {begun.cache_root[:12]}…, and this one is "
            f"{job.manifest.root[:12]}…. Pass the --cache it was begun with, or begin a new run."
        )
    return _require_same(begun.settings, job_settings(job))


def require_same_computing(begun: Position, session: Session) -> tuple[str, ...]:
    """Refuses a policy or engine that computes other numbers; returns allowed differences."""
    before, after = begun.identity, identity_of(session)
    if spread_of(before) == spread_of(after):
        _require_same(before.computed, after.computed)
    else:
        _require_same(_without_spread(before.computed), _without_spread(after.computed))
    was = {**begun.made_with, **spread_of(before)}
    is_now = {**made_with(session), **spread_of(after)}
    changed = tuple(
        f"after step {begun.global_step}: {name} {was.get(name, 'none')} → "
        f"{is_now.get(name, 'none')}"
        for name in dict.fromkeys([*is_now, *was])
        if was.get(name, "none") != is_now.get(name, "none")
    )
    if changed and session.world.rank == 0:
        listed = "\n  ".join(changed)
        logger.warning(
            "This run resumes with other parts than it began with:\n  %s\nIts results may differ "
            "in the last bits from those of an uninterrupted run.",
            listed,
        )
    return changed


def spread_of(identity: RunIdentity) -> dict[str, str]:
    """The number of ranks and the ZeRO stage, which may both change when a run resumes."""
    return {"ranks": str(identity.world_size), "ZeRO stage": str(identity.zero_stage)}


def _without_spread(computed: Mapping[str, str]) -> dict[str, str]:
    """The settings that change results, without DeepSpeed's that only place the work."""
    return {name: value for name, value in computed.items() if not IS_OF_SPREAD(name)}


def engine_text(config: dict[str, Any]) -> bytes:
    """The content of deepspeed.json."""
    return f"{json.dumps(masked(config), indent=2, sort_keys=True, default=str)}\n".encode()


def _require_same(begun: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Refuses values that differ; returns those that only set the length or the end, by name."""
    lines = differences(begun, now, had="begun with")
    if wrong := [line for name, line in lines.items() if not binds(name, "length", "end")]:
        listed = "\n  ".join(wrong)
        raise FingerprintError(
            f"This run was begun with other settings. What differs:\n  {listed}\n"
            "Undo the change, or begin a new run in another --output."
        )
    return lines


PACKAGES = ("torch", "transformers", "deepspeed")
# What only says where in the ranks values lie; quantized ones are others.
IS_OF_SPREAD = re.compile(
    r"deepspeed (train_batch_size$|data_types\.|zero_optimization\.(?!.*quantized))"
).match


def versions() -> dict[str, str]:
    """The versions of the libraries that compute."""
    return {package: version(package) for package in PACKAGES}


def binding(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that have to be the same in all parts of a run, or change its length or end."""
    kept = bound(settings, "run", "length", "end")
    if not (settings.get("train.patience") or settings.get("train.write_best")):
        kept.pop("train.best", None)  # then it only keeps a checkpoint
    return kept


def job_settings(job: TrainingJob) -> dict[str, str]:
    """The settings known before weights are loaded, with the method's options in force."""
    settings = binding(as_absolute(job.config))
    given = {name: value for name, value in settings.items() if not name.startswith("method.")}
    options = {f"method.{name}": repr(value) for name, value in job.recipe.values.items()}
    held_out = job.held_out[1].root if job.held_out else "none"
    return {**given, **options, **job.policy_identity, "root of train.eval_cache": held_out}


def identity_of(session: Session) -> RunIdentity:
    """Everything that the numbers of a run depend on."""
    job, model = session.job, causal_model(session.policy.model)
    engine = json.loads(json.dumps(masked(session.engine_config), default=str))
    options = {f"method.{name}": repr(value) for name, value in session.recipe.values.items()}
    computed = {
        **options,
        "model.attention": own_attention(model),
        "model.device": session.policy.device.type,
        "train.dtype": session.policy.dtype,
        **{f"deepspeed {name}": repr(value) for name, value in leaves(engine)},
    }
    return RunIdentity(
        cache_root=job.manifest.root,
        world_size=session.world.size,
        zero_stage=stage_of(session.engine_config),
        settings=job_settings(job),
        computed=computed,
    )


def made_with(session: Session) -> dict[str, str]:
    """Facts that may change the last bits of a number, and are allowed to differ."""
    path = session.policy.path
    parts = _parts(session.job, session.policy.device)
    return {**parts, "layout": path.layout, "log-prob head": path.head}


def _parts(job: TrainingJob, device: torch.device) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    found = {"align": __version__, **versions(), "device": name}
    if job.config.model.compile:
        found["layers"] = "compiled"
    return {**found, "peft": _version("peft")} if job.config.lora.enabled else found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the import says what to install
        return "none"
