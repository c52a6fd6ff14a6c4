"""Opens the folder of a run: its lock, its checkpoint, and the checks before resuming."""

from __future__ import annotations

import json
import logging
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import __version__
from ...schemas.batches import World
from ...schemas.checkpoint import Checkpoint, RunIdentity
from ...schemas.errors import FingerprintError, StorageError, UsageError, differences
from ...schemas.json_codec import digest
from ...schemas.safe_text import masked
from ...stages.engine.deepspeed_config import leaves, preset_of, stage_of
from ...stages.engine.distributed import gathered, run_on_all_ranks, run_on_rank_zero
from ...stages.methods.objective import Objective
from ...stages.model.logprobs import causal_model, own_attention
from ...stages.storage.disk import fs
from ...stages.storage.disk.locks import lock_of, owner_lock
from ...stages.storage.run.checkpoints import CHECKPOINTS, damage, whole_checkpoints
from ...stages.storage.run.run_folder import ENDINGS, RunFolder, read_ending
from ..options.settings import as_absolute, as_yaml
from ..options.settings_table import must_match, settings_to_match

if TYPE_CHECKING:
    from .setup import Run

logger = logging.getLogger("align")

SHARED_SECONDS = 60.0  # for a network file system to show another machine's files
PACKAGES = ("torch", "transformers", "deepspeed")
OF_RANKS = "deepspeed train_batch_size"  # equals the number of ranks


@contextmanager
def open_folder(run: Run) -> Iterator[None]:
    """Owns the folder in the block, and finds the checkpoint to resume from."""
    world, folder, resumes = run.world, run.folder, run.config.train.resume == "auto"
    run.began = time.monotonic()  # clocks of machines differ
    machines = len({*gathered(world, socket.gethostname())}) if run.remote else 1
    if machines > 1:
        raise UsageError(
            f"{run.config.train.output}: the ranks are on {machines} machines, so checkpoints "
            "need a shared folder. Choose an --output there, and upload it afterwards."
        )
    with ExitStack() as stack:

        def enter() -> tuple[str, bool]:
            run_id = uuid.uuid4().hex[:12]
            folder.prepare()
            is_finished = resumes and _is_finished(run)
            if not is_finished:
                stack.enter_context(owner_lock(folder.root, run_id))
                folder.sweep()
                if not resumes:
                    folder.require_new()
            elif folder.left_over():
                with owner_lock(folder.root, run_id):
                    folder.sweep()
            return run_id, is_finished

        run.run_id, run.is_finished = run_on_rank_zero(world, enter)
        if not run.is_finished:
            run_on_all_ranks(world, lambda: require_shared(folder, run.run_id))
            if resumes and (checkpoint := _whole_checkpoint(world, folder)):
                run.checkpoint, run.changes = checkpoint, checkpoint.changes
                lengths = run_on_rank_zero(
                    world, lambda: require_same_run(checkpoint.identity, run)
                )
                for name, line in lengths.items() if world.rank == 0 else ():
                    follows = "; the learning rate schedule follows the new length"
                    logger.warning("%s%s.", line, follows if must_match(name, "length") else "")
        if run.remote and world.rank == 0:
            stack.enter_context(run.remote.pushed_at_end())
        yield


def require_shared(folder: RunFolder, run_id: str) -> None:
    """Refuses another folder than rank zero's, because all ranks save into one."""
    began = time.monotonic()
    while True:
        with suppress(StorageError):  # a network file system may show a new file late
            if run_id.encode() in fs.read_bytes(lock_of(folder.root)):
                return
        if time.monotonic() - began > SHARED_SECONDS:
            raise UsageError(
                f"{folder.root.resolve()} on {socket.gethostname()} is not the folder that rank 0 "
                "writes to. Choose an --output on a shared file system that has the same path on "
                "every machine."
            )
        time.sleep(0.2)


def _is_finished(run: Run) -> bool:
    """Whether the model of these settings already exists."""
    ending = read_ending(run.folder)
    if ending is None or ending.ending != "finished":
        return False
    if require_same_run(ending.identity, run):
        return False
    lacks_merged = run.config.lora.merge and not run.folder.merged.exists()
    return run.folder.model.exists() and not lacks_merged


def _whole_checkpoint(world: World, folder: RunFolder) -> Checkpoint | None:
    """The newest complete checkpoint; rank zero chooses, as ranks may see different ones."""
    candidates = whole_checkpoints(folder)
    while checkpoint := run_on_rank_zero(world, lambda: next(candidates, None)):
        path = folder.step(checkpoint.state.step)
        why = damage_on_ranks(world, path, checkpoint)
        if not why:
            return checkpoint
        if world.rank == 0:
            logger.warning("%s", CHECKPOINTS.damaged(path, why))
    return None


def damage_on_ranks(world: World, path: Path, checkpoint: Checkpoint) -> str:
    """The first damage of a checkpoint; each rank checks its part of the files."""
    found = gathered(world, damage(path, checkpoint, world.rank, world.size))
    return next(filter(None, found), "")


def require_same_run(started: RunIdentity, run: Run) -> dict[str, str]:
    """Refuses settings of another run; returns changes of the run's length and end."""
    if started.cache_root != run.manifest.root:
        raise FingerprintError(
            f"The run was started on the cache {started.cache_root[:12]}…, but this one is "
            f"{run.manifest.root[:12]}…. Pass the run's own --cache, or start a new run."
        )
    return _require_same(started.settings, settings_of(run))


def require_checkpoint_match(run: Run) -> None:
    """Refuses to resume with another policy or engine; then writes the run's settings."""
    checkpoint = run.checkpoint
    if checkpoint is not None:
        run.changes += run_on_all_ranks(run.world, lambda: require_same_computing(checkpoint, run))

    def begin() -> None:
        engine = json.dumps(masked(run.engine_config), indent=2, sort_keys=True, default=str)
        if run.folder.ending.exists():
            ENDINGS.drop(run.folder.ending)
        fs.unlink(run.folder.answers)  # the policy changes from now on
        fs.unlink(run.folder.results)
        fs.publish(run.folder.config, as_yaml(run.config).encode())
        fs.publish(run.folder.engine, f"{engine}\n".encode())

    run_on_rank_zero(run.world, begin)


def require_same_computing(checkpoint: Checkpoint, run: Run) -> tuple[str, ...]:
    """Refuses a policy or engine with other numerics; returns allowed differences."""
    before, after = checkpoint.identity, identity_of(run)
    if before.zero_stage != after.zero_stage:
        raise FingerprintError(
            f"This run was started under ZeRO stage {before.zero_stage}, but train.deepspeed is "
            f"{run.config.train.deepspeed}, ZeRO stage {after.zero_stage}. Set it to auto, which "
            f"keeps the stage, or pass --deepspeed {resumed_preset(before)}."
        )
    was, now = (
        {name: value for name, value in one.computed.items() if name != OF_RANKS}
        for one in (before, after)
    )
    _require_same(was, now)
    made = {**checkpoint.made_with, "ranks": str(before.world_size)}
    makes = {**made_with(run), "ranks": str(after.world_size)}
    changed = tuple(
        f"after step {checkpoint.state.step}: {name} {made.get(name, 'none')} → "
        f"{makes.get(name, 'none')}"
        for name in dict.fromkeys([*makes, *made])
        if made.get(name, "none") != makes.get(name, "none")
    )
    if changed and run.world.rank == 0:
        logger.warning(
            "This run resumes with other versions or devices:\n  %s\nIts results may differ in the "
            "last bits from those of an uninterrupted run.",
            "\n  ".join(changed),
        )
    return changed


def resumed_preset(started: RunIdentity) -> str:
    """The preset of a resumed run's ZeRO stage, with the optimizer on the same device.

    The optimizers of CPU and GPU compute differently.
    """
    kept = started.computed.get("deepspeed zero_optimization.offload_optimizer.device", "'none'")
    return preset_of(started.zero_stage, offloads=kept != "'none'")


def _require_same(started: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Refuses values that differ; returns changes of the length or the end, by name."""
    lines = differences(started, now, had="started with")
    if wrong := [line for name, line in lines.items() if not must_match(name, "length", "end")]:
        listed = "\n  ".join(wrong)
        raise FingerprintError(
            f"This run was started with other settings:\n  {listed}\n"
            "Undo the change, or start a new run in another --output."
        )
    return lines


def run_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that must match on resume, or that change the run's length or end."""
    kept = settings_to_match(settings, "run", "length", "end")
    if not (settings.get("train.patience") or settings.get("train.write_best")):
        kept.pop("train.best", None)  # without these it only keeps a checkpoint
    return kept


def settings_of(run: Run) -> dict[str, str]:
    """The settings known before weights are loaded, with the method's resolved options."""
    settings = run_settings(as_absolute(run.config))
    given = {name: value for name, value in settings.items() if not name.startswith("method.")}
    # A set alone may have no name. The order of several changes train.best, or nothing.
    roots = sorted(f"{name} {made.root}".strip() for name, (_, made) in run.held_out.items())
    held_out = {"root of train.eval_cache": ", ".join(roots) or "none"}
    return {**given, **_options(run.asked), **run.identity, **held_out}


def identity_of(run: Run) -> RunIdentity:
    """All values that decide the numbers of a run."""
    engine = json.loads(json.dumps(masked(run.engine_config), default=str))
    computed = {
        **_options(run.objective),
        "model.attention": own_attention(causal_model(run.policy.model)),
        "model.device": run.policy.device.type,
        "train.dtype": run.policy.dtype,
        **{f"deepspeed {name}": repr(value) for name, value in leaves(engine)},
    }
    return RunIdentity(
        cache_root=run.manifest.root,
        world_size=run.world.size,
        zero_stage=stage_of(run.engine_config),
        settings=settings_of(run),
        computed=computed,
    )


def numbers_of(run: Run) -> str:
    """A digest of all settings that decide a run's numbers at each step."""
    known, train = identity_of(run), run.config.train
    settings = {name: one for name, one in known.settings.items() if not must_match(name, "end")}
    computed = {name: one for name, one in known.computed.items() if name != OF_RANKS}
    averaged_over = [train.log_every, train.limit_eval_batches]
    return digest([known.cache_root, settings, computed, averaged_over])


def _options(objective: Objective) -> dict[str, str]:
    return {f"method.{name}": repr(value) for name, value in objective.values.items()}


def made_with(run: Run) -> dict[str, str]:
    """Values that may change the last bits of numbers, and may differ on resume."""
    on_gpu = run.policy.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    found = {"align": __version__, **versions(), "device": device}
    if run.config.lora.enabled:
        found["peft"] = version("peft")
    path = run.policy.path
    return {**found, "layout": path.layout, "log-prob head": path.head}


def versions() -> dict[str, str]:
    """The versions of the libraries that compute numbers."""
    return {package: version(package) for package in PACKAGES}
