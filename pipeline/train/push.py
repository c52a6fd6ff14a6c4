"""`align push`: uploads the trained model of a run to the Hugging Face Hub, in one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
    parse_hf_uri,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ... import __version__
from ...schemas.errors import ServerError, UsageError
from ...stages.model.model_folder import COMPANIONS, read_json
from ...stages.tracking.run_texts import public_name
from .run_report import require_finished, training_folder, use_of_model

ADAPTER = "adapter_config.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PUBLISHED = (*WEIGHTS, "config.json", ADAPTER, *COMPANIONS, "README.md")


def push(root: Path, name: str, *, public: bool, branch: str, message: str) -> Iterator[str]:
    """Uploads the model of a finished run; yields the commit's address and how to use it."""
    folder = training_folder(root)
    require_finished(folder)
    if name.count("/") != 1:
        raise UsageError(f"{name} is no repository of the Hub. Write OWNER/NAME.")
    if not get_token():
        raise UsageError("The Hub needs a token: log in with `hf auth login`, or set HF_TOKEN.")
    model = folder.loadable
    files: dict[str, Path | bytes] = {
        path.name: path
        for path in sorted(model.iterdir())
        if path.is_file() and _is_published(path.name)
    }
    if ADAPTER in files:
        files[ADAPTER] = _public_adapter(model / ADAPTER)
    with _hub_errors(name):
        hub = HfApi()
        before = _repository(hub, name, branch, public=public)
        others = {file.rfilename for file in before.siblings or ()} - files.keys()
        # What an earlier push left would be loaded too; a license may be the owner's.
        stale = [file for file in sorted(others) if _is_published(file) and file[:7] != "LICENSE"]
        added = [CommitOperationAdd(file, content) for file, content in files.items()]
        commit = hub.create_commit(
            name,
            [*added, *map(CommitOperationDelete, stale)],
            commit_message=message or f"Trained by align {__version__}",
            revision=branch,
            parent_commit=before.sha,
        )
    yield commit.commit_url + (": nothing has changed" if commit.oid == before.sha else "")
    yield from use_of_model(model, f"hf://{name}@{commit.oid}", {})


def _is_published(name: str) -> bool:
    is_plain = not name.startswith(".") and "/" not in name
    return is_plain and any(fnmatch(name, pattern) for pattern in PUBLISHED)


def _public_adapter(config: Path) -> bytes:
    """An adapter's config that names its base as on the Hub, or without its local folder."""
    settings = read_json(config)
    base, revision = public_name(settings["base_model_name_or_path"]), None
    if base.startswith("hf://"):
        base, revision = (uri := parse_hf_uri(base)).id, uri.revision
    settings |= {"base_model_name_or_path": base, "revision": revision}
    return f"{json.dumps(settings, indent=2, sort_keys=True)}\n".encode()


def _repository(hub: HfApi, name: str, branch: str, *, public: bool) -> ModelInfo:
    """The repository at the end of a branch; makes both if needed, and refuses the other kind."""
    try:
        found = hub.model_info(name)
    except RepositoryNotFoundError:
        hub.create_repo(name, private=not public)
        found = hub.model_info(name)
    if bool(found.private) == public:
        kind, remedy = ("private", "leave out") if public else ("public", "add")
        raise UsageError(f"{name} is {kind} on the Hub. Choose another name, or {remedy} --public.")
    if branch == "main":
        return found
    try:
        return hub.model_info(name, revision=branch)
    except RevisionNotFoundError:
        hub.create_branch(name, branch=branch)
        return hub.model_info(name, revision=branch)


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turns the errors of the client, and of the servers behind it, into one sentence."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UsageError(f"{name}: HF_HUB_OFFLINE is set. Unset it to upload.") from error
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # The upload of a large file fails with a RuntimeError, caused by the server's answer.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        why = " ".join(str(cause).split()).rstrip(".")
        if isinstance(cause, HfHubHTTPError):
            status, said = cause.response.status_code, cause.server_message
            why = f"the Hub answers {status}{f', {said}' if said else ''}"
            if status in (401, 403, 404, 409):
                raise UsageError(
                    f"{name}: {why}. Use a token that may write there, and a name of your own."
                ) from error
        if isinstance(error, ValueError):
            raise UsageError(f"{name}: {why}.") from error
        raise ServerError(f"{name}: {why}. Run the same command again.") from error
