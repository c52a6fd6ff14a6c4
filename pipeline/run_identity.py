"""What names a run: the settings, the policy and the libraries that its numbers depend on."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..schemas.checkpoint import RunIdentity
from ..schemas.errors import CorruptionError
from ..schemas.safe_text import masked
from ..stages.engine.deepspeed_config import leaves, stage_of
from ..stages.model.logprobs import causal_model
from ..stages.storage import fs
from .settings import as_absolute, as_yaml, read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schemas.config import Config
    from ..stages.storage.run_folder import RunFolder
    from .session import Session
    from .training_job import TrainingJob

PACKAGES = ("torch", "transformers", "deepspeed")
# What may change between two parts of a run: nothing that is learned depends on it.
MAY_CHANGE = {
    "train.cache",  # its root is compared instead
    "train.eval_cache",  # likewise
    "train.model",  # the digests of its files are compared instead
    "train.output",
    "train.resume",
    "train.max_time",
    "train.tokens_per_batch",
    "train.eval_every",
    "train.eval_table",
    "train.eval_text",
    "train.limit_eval_batches",
    "train.log_every",
    "train.save_every",
    "train.save_minutes",
    "train.keep_last",
    "train.best",
    "train.nonfinite_limit",
    "lora.merge",
}
# What may change as well, but makes the whole another run than one that was never stopped.
CHANGES_LENGTH = {"train.epochs", "train.max_steps"}
SECTIONS = ("train", "lora", "method")


def versions() -> dict[str, str]:
    """Of the libraries that compute."""
    return {package: version(package) for package in PACKAGES}


def binding(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that have to be the same in all parts of a run, or that change its length."""
    return {
        name: repr(value)
        for name, value in settings.items()
        if name.partition(".")[0] in SECTIONS and name not in MAY_CHANGE
    }


def job_settings(job: TrainingJob) -> dict[str, str]:
    """What is known before a weight is loaded; options of the method as they are in force."""
    settings = binding(as_absolute(job.config))
    given = {name: value for name, value in settings.items() if not name.startswith("method.")}
    options = {f"method.{name}": repr(value) for name, value in job.recipe.values.items()}
    held_out = job.held_out[1].root if job.held_out else "none"
    return {**given, **options, **job.policy_identity, "root of train.eval_cache": held_out}


def identity_of(session: Session) -> RunIdentity:
    """All that the numbers of a run depend on."""
    job, model = session.job, causal_model(session.policy.model)
    engine = json.loads(json.dumps(masked(session.engine_config), default=str))
    settled = {f"method.{name}": repr(value) for name, value in session.recipe.values.items()}
    # A packed layout attends by sdpa, piece by piece, and has a name of its own for it.
    packed = session.policy.path.layout == "packed"
    computed = {
        **settled,
        "model.attention": "sdpa" if packed else str(model.config._attn_implementation),
        "model.device": session.policy.device.type,
        "train.dtype": str(model.dtype).removeprefix("torch."),
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
    """What may change the last bits of a number, and may differ all the same."""
    path = session.policy.path
    on_gpu = session.policy.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    found = {"align": __version__, **versions(), "device": device}
    if session.job.config.lora.enabled:
        found["peft"] = _version("peft")
    return {**found, "layout": path.layout, "log-prob head": path.head}


def signed_settings(config: Config) -> bytes:
    """The text of a run's config.yaml."""
    return signed(as_yaml(config))


def signed(text: str) -> bytes:
    """The text after a first line that vouches for it."""
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return f"# sha256 {sha256} of the lines below; copy this file to change it.\n{text}".encode()


def run_settings(folder: RunFolder) -> dict[str, Any]:
    """What config.yaml says, by dotted names; CorruptionError where it is not as it was written."""
    text = fs.read_bytes(folder.config)
    _, _, lines = text.partition(b"\n")
    if text != signed(lines.decode("utf-8", "replace")):
        raise CorruptionError(
            f"{folder.config} is damaged or was edited. Restore it, or remove it: --resume auto "
            "then holds to what the checkpoint says, and writes it anew."
        )
    return read_yaml(folder.config)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the import says what to install
        return "none"
