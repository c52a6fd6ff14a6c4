"""Digests of the policies to train, made once on each machine, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...schemas.batches import World
from ...schemas.config import ModelOptions
from ...schemas.errors import FingerprintError
from ...schemas.file_version import Remember
from ...stages.engine.distributed import gathered, run_on_all_ranks
from ...stages.model.loading.model_folder import ModelFiles, model_identity
from ..jobs.object_inputs import local_options
from ..plan.cache_checks import named_elsewhere, require_same_model, require_same_reference
from .training_job import TrainingJob

ModelSource: TypeAlias = tuple[str, str]  # folder, adapter
Identities: TypeAlias = Mapping[ModelSource, Mapping[str, str]]


@dataclass(frozen=True)
class PolicyDigests:
    """Digests of the models of some trainings, and the files that they cover."""

    identities: Identities
    files: Mapping[ModelSource, ModelFiles]

    def identified(self, job: TrainingJob) -> TrainingJob:
        """The job with its digests; refuses one of another reference than the cache's."""
        policy, *named = _to_digest(job)
        for other in named:
            identity = self.identities[_source(other)]
            require_same_model(job.settings, job.manifest, other, identity)
        identity = self.identities[_source(policy)]
        may_differ = job.config.train.other_reference or "reference" not in job.recipe.needs
        return replace(
            job,
            policy_identity=identity,
            policy_files=self.files[_source(policy)],
            begins_as_reference=require_same_reference(
                job.manifest, policy.path, identity, may_differ=may_differ
            ),
        )


def digest_policies(jobs: Iterable[TrainingJob], world: World, remember: Remember) -> PolicyDigests:
    """Digests every model once on the first rank of each machine, which may have its own copy."""
    models = {_source(model): model for job in jobs for model in _to_digest(job)}
    files = run_on_all_ranks(
        world, lambda: {source: ModelFiles.of(model) for source, model in models.items()}
    )
    mine = models if world.is_first_here else {}
    found = run_on_all_ranks(
        world, lambda: {source: model_identity(model, remember) for source, model in mine.items()}
    )
    return PolicyDigests(one_for_all(gathered(world, found)), files)


def one_for_all(found: Sequence[Identities]) -> Identities:
    """The first rank's digests; refuses a machine whose copy differs."""
    for rank, others in enumerate(found):
        for source, identity in others.items():
            first = found[0][source]
            if differing := [name for name in first if identity[name] != first[name]]:
                raise FingerprintError(
                    f"{source[0]} on the machine of rank {rank} is not the model that rank 0 has "
                    f"there: {', '.join(differing)} differ. Copy the folder to every machine again."
                )
    return found[0]


def _source(model: ModelOptions) -> ModelSource:
    return model.path, model.adapter


def _to_digest(job: TrainingJob) -> list[ModelOptions]:
    """The policy, and the reference that the settings name if it is not at the cache's path."""
    named = None if job.config.train.model else named_elsewhere(job.settings, job.manifest)
    return [job.policy, *([local_options(named)] if named else [])]
