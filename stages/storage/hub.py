"""Repositories of the Hugging Face Hub, read through huggingface_hub's own cache and token.

An address is `hf://owner/name@revision/inside`, and `hf://datasets/…` for a data set. Its revision
is resolved to a commit once per process; all later requests name that commit, and files of a commit
in the local cache need no request.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import ServerError, UsageError
from .locations import HUB, PREFIXES, Kind

if TYPE_CHECKING:
    from huggingface_hub import HfUri

logger = logging.getLogger("align")


@cache
def pinned(address: str, kind: Kind) -> str:
    """The address with its revision resolved to a commit."""
    import httpx2  # noqa: PLC0415 - huggingface_hub's client; only the Hub needs them
    from huggingface_hub import HfApi, errors  # noqa: PLC0415

    uri, api = _parsed(address, kind), HfApi()
    if re.fullmatch("[0-9a-f]{40}", uri.revision or ""):
        return _address(uri, kind, str(uri.revision))
    with _explained(address, uri):
        is_reached = False
        try:  # `resolve_revision` does not tell whether it has reached the Hub
            api.repo_info(uri.id, repo_type=kind, revision=uri.revision)
            is_reached = True
        except (httpx2.TransportError, errors.OfflineModeIsEnabled):
            pass
        except errors.HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
        commit = api.resolve_revision(
            uri.id, repo_type=kind, revision=uri.revision, local_files_only=not is_reached
        ).resolved
    if not is_reached:
        logger.warning("%s: the Hub is not reached; its cache has commit %s.", address, commit)
    return _address(uri, kind, commit)


def fetch(address: str, kind: Kind, names: Iterable[str]) -> Path:
    """The folder of a pinned address in the local cache, once it has these files."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - as above

    uri = _parsed(address, kind)
    inside = f"{uri.path_in_repo}/" if uri.path_in_repo else ""
    patterns = [glob.escape(f"{inside}{name}") for name in names]
    with _explained(address, uri):
        root = snapshot_download(
            uri.id, repo_type=kind, revision=uri.revision, allow_patterns=patterns
        )
    return Path(root, uri.path_in_repo)


def names_at(address: str, kind: Kind) -> list[str]:
    """The files of a repository below a pinned address."""
    import httpx2  # noqa: PLC0415 - as above
    from huggingface_hub import HfApi, RepoFile, errors, get_cached_repo_tree  # noqa: PLC0415

    uri = _parsed(address, kind)
    inside = f"{uri.path_in_repo}/" if uri.path_in_repo else ""
    with _explained(address, uri):
        try:
            tree = get_cached_repo_tree(uri.id, repo_type=kind, revision=uri.revision)
        except errors.CachedRepoTreeNotFoundError:
            try:
                every = HfApi().list_repo_tree(
                    uri.id, recursive=True, revision=uri.revision, repo_type=kind
                )
                tree = [one for one in every if isinstance(one, RepoFile)]
            except (httpx2.TransportError, errors.OfflineModeIsEnabled):
                # An older client may have filled the cache.
                root = fetch(address, kind, [])
                return [
                    one.relative_to(root).as_posix() for one in root.rglob("*") if one.is_file()
                ]
    return [one.path.removeprefix(inside) for one in tree if one.path.startswith(inside)]


def _parsed(address: str, kind: Kind) -> HfUri:
    from huggingface_hub import errors, parse_hf_uri  # noqa: PLC0415 - as above

    try:
        uri = parse_hf_uri(address)
    except errors.HfUriError as error:
        raise UsageError(f"{address}: {error.msg} Write hf://{PREFIXES[kind]}OWNER/NAME.") from None
    if uri.type != kind:
        raise UsageError(
            f"{address} is a {uri.type} of the Hub, and a {kind} is needed. "
            f"Write hf://{PREFIXES[kind]}OWNER/NAME."
        )
    return uri


def _address(uri: HfUri, kind: Kind, commit: str) -> str:
    inside = f"/{uri.path_in_repo}" if uri.path_in_repo else ""
    return f"{HUB}{PREFIXES[kind]}{uri.id}@{commit}{inside}"


@contextmanager
def _explained(address: str, uri: HfUri) -> Iterator[None]:
    """Turns an error of huggingface_hub into one message."""
    import httpx2  # noqa: PLC0415 - as above
    from huggingface_hub import errors, is_offline_mode  # noqa: PLC0415

    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError:
        raise UsageError(
            f"{address} is gated. Ask for access at {uri.to_url()}, and {log_in}."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{address}: the Hub has no such {uri.type}, or a private one. Check the name, or "
            f"{log_in}. A folder is given as ./NAME."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{address}: {uri.id} has no revision {uri.revision}. Name a branch, a tag or a commit."
        ) from None
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError):
        if is_offline_mode():
            raise UsageError(
                f"{address} is not complete in the Hub's cache, and HF_HUB_OFFLINE is set. Unset "
                "it once. A folder is given as ./NAME."
            ) from None
        raise ServerError(
            f"{address}: the Hub cannot be reached, and its cache lacks files. Check the network. "
            "A folder is given as ./NAME."
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UsageError(
                f"{address}: the Hub refuses the token. Renew it, or {log_in}."
            ) from None
        raise ServerError(f"{address}: the Hub answers {status}. Try again later.") from None
    except (httpx2.HTTPError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise ServerError(f"{address}: {error} Try again.") from error
