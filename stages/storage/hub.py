"""Repositories of the Hugging Face Hub, read through huggingface_hub's own cache and token.

An address is `hf://owner/name@revision/inside`, and `hf://datasets/…` for a data set. Its revision
is resolved to a commit once per process; all later requests name that commit, and files of a commit
in the local cache need no request.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import ServerError, UsageError
from .locations import HUB, PREFIXES, Kind

if TYPE_CHECKING:
    from huggingface_hub import HfUri


@cache
def pinned(address: str, kind: Kind) -> str:
    """The address with its revision resolved to a commit; a location elsewhere is unchanged."""
    if not address.startswith(HUB):
        return address
    from huggingface_hub import HfApi  # noqa: PLC0415 - only the Hub needs it

    with _opened(address, kind) as uri:
        # Where the Hub is not reached, the client logs that it takes the cached commit.
        found = HfApi().resolve_revision(uri.id, repo_type=kind, revision=uri.revision)
    inside = f"/{uri.path_in_repo}" if uri.path_in_repo else ""
    return f"{HUB}{PREFIXES[kind]}{uri.id}@{found.resolved}{inside}"


def fetch(address: str, kind: Kind, names: Iterable[str]) -> Path:
    """The folder of a pinned address in the local cache, once it has these files."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - as above

    with _opened(address, kind) as uri:
        patterns = [glob.escape(f"{uri.path_in_repo}/{name}".lstrip("/")) for name in names]
        root = snapshot_download(
            uri.id, repo_type=kind, revision=uri.revision, allow_patterns=patterns
        )
    return Path(root, uri.path_in_repo)


def names_at(address: str, kind: Kind) -> list[str]:
    """The files of a repository below a pinned address."""
    from huggingface_hub import HfApi, RepoFile, errors, get_cached_repo_tree  # noqa: PLC0415

    with _opened(address, kind) as uri:
        commit = uri.revision
        try:
            files = get_cached_repo_tree(uri.id, repo_type=kind, revision=commit)
        except errors.CachedRepoTreeNotFoundError:
            tree = HfApi().list_repo_tree(uri.id, recursive=True, repo_type=kind, revision=commit)
            files = [one for one in tree if isinstance(one, RepoFile)]
    inside = f"{uri.path_in_repo}/" if uri.path_in_repo else ""
    return [one.path.removeprefix(inside) for one in files if one.path.startswith(inside)]


@contextmanager
def _opened(address: str, kind: Kind) -> Iterator[HfUri]:
    """The parts of an address; turns an error of huggingface_hub into one message."""
    import httpx2  # noqa: PLC0415 - as above
    from huggingface_hub import errors, is_offline_mode, parse_hf_uri  # noqa: PLC0415

    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        uri = parse_hf_uri(address)
        if uri.type != kind:
            raise errors.HfUriError(address, f"It is a {uri.type}, and a {kind} is needed.")
        yield uri
    except errors.HfUriError as error:
        raise UsageError(f"{address}: {error.msg} Write {HUB}{PREFIXES[kind]}OWNER/NAME.") from None
    except errors.RepositoryNotFoundError as error:
        is_gated = isinstance(error, errors.GatedRepoError)
        what = "is gated" if is_gated else "is not on the Hub, or private"
        raise UsageError(
            f"{address} {what}. Look at {uri.to_url()}, and {log_in}. A folder is given as ./NAME."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{address}: there is no revision {uri.revision}. Name a branch, a tag or a commit."
        ) from None
    except (
        *(errors.RevisionResolutionError, errors.LocalEntryNotFoundError),
        errors.OfflineModeIsEnabled,
    ):
        raise (UsageError if is_offline_mode() else ServerError)(
            f"{address} is not complete in the Hub's cache, and the Hub is not reached. Check the "
            "network and HF_HUB_OFFLINE. A folder is given as ./NAME."
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise (UsageError if status in (401, 403) else ServerError)(
            f"{address}: the Hub answers {status}. Check the token ({log_in}), or try again later."
        ) from None
    except (httpx2.HTTPError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise ServerError(f"{address}: {error} Try again.") from error
