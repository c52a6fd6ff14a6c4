"""MLflow's registry: the model of a run becomes a version of a registered model."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas.json_codec import digest
from ..storage.disk import fs


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model."""

    name: str
    number: str
    is_new: bool  # False: this very model was registered under this name before


def register_version(
    client: Any, run_id: str, folder: Path, *, name: str, alias: str
) -> ModelVersion:
    """Uploads a model's folder to its run and makes a version of it, unless there is one.

    The path is named by the content: a longer training never writes over a version's files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = digest([[str(path.relative_to(folder)), fs.sha256_of(path)] for path in files])
    at = f"{folder.name}-{content[:16]}"
    source = f"{client.get_run(run_id).info.artifact_uri.rstrip('/')}/{at}"
    known = client.search_model_versions(f"run_id = '{run_id}'")
    found: Any = next((one for one in known if (one.name, one.source) == (name, source)), None)
    is_new = found is None
    if is_new:
        client.log_artifacts(run_id, str(folder), at)
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            client.create_registered_model(name)
        except exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.create_model_version(name, source, run_id=run_id, await_creation_for=0)
    version = str(found.version)
    if alias:
        client.set_registered_model_alias(name, alias, version)
    return ModelVersion(name, version, is_new=is_new)
