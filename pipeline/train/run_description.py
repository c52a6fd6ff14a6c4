"""What a tracker is told of a training beside its numbers: name, description, inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...schemas.errors import counted
from ...stages.report.signs import Sign
from ...stages.storage.copies import origin_of
from ...stages.storage.locations import is_remote
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.journaled_run import Run, inherited
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ...stages.tracking.tracker import ROUND_TAG, SIGNS_TAG, TRIAL_TAG
from .training_job import Session, TrainingJob

ALWAYS = ("train.lr", "train.batch_size", "train.epochs")
PLACES = ("train.cache", "train.model", "train.output")


def name_of_training(job: TrainingJob, made_by: str) -> str:
    """Model, method and data; in a sweep its name there, in rounds the round, tell it apart."""
    number = inherited(ROUND_TAG)
    data = f"round {number}" if number else data_of(job)
    return run_name(job.policy.path, inherited(TRIAL_TAG) or made_by, data)


def describe_training(session: Session, params: Mapping[str, str], folder: RunFolder) -> str:
    """What was trained on what, where all of it is, and the settings that were chosen."""
    job, source = session.job, session.source
    held_out = f", {source.eval_rows:,} held out" if source.eval_rows else ""
    sentence = (
        f"{quoted(model_name(job.policy.path))} trained by {quoted(session.recipe.name)} on "
        f"{counted(source.train_rows, 'rows')} of {quoted(data_of(job))}{held_out}."
    )
    output = job.config.train.output
    places = {
        "run": output if is_remote(output) else str(folder.root.absolute()),
        "cache": origin_of(str(job.cache.root.resolve())),
        "policy": job.policy.path,
        "reference": job.manifest.model,
    }
    given = [name for section in ("train", "lora") for name in job.settings.given(section)]
    options = [name for name in params if name.startswith("method.")]
    names = [name for name in dict.fromkeys([*options, *ALWAYS, *given]) if name not in PLACES]
    settings = {name: params[name] for name in names if name in params}
    return description(sentence, {**places, **settings})


def record_inputs(run: Run, job: TrainingJob) -> None:
    """Records the data that the policy is made of, and the caches of them."""
    manifest = job.manifest
    run.log_files(manifest.inputs, context="reference")
    caches = {"training": (job.cache, manifest)}
    caches |= {"evaluation": job.held_out} if job.held_out else {}
    for context, (cache, made) in caches.items():
        root = cache.root.resolve()
        run.log_dataset(root.name, digest=made.root, source=origin_of(str(root)), context=context)


def record_signs(run: Run, signs: Sequence[Sign]) -> None:
    """Records what stands out as a tag: it is shown beside the run, and searched by."""
    told = "; ".join(f"{sign.name}: {sign.said}" for sign in signs)
    run.set_tags({SIGNS_TAG: told or "nothing"})


def data_of(job: TrainingJob) -> str:
    """A name for the data that the cache was made of."""
    return data_name([entry.name for entry in job.manifest.inputs])
