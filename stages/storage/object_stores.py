"""Opens the store of a bucket, with credentials of the usual chain, which are never kept or shown.

Variables of the environment come first, then the profile in `~/.aws`, then what the machine is
given: a web identity, a container's role, or its instance metadata. The store asks for these itself
when it first needs them.
"""

from __future__ import annotations

import configparser
import os
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...schemas.errors import UsageError
from ...schemas.safe_text import hear, hear_secret

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, MemoryStore, S3Credential, S3Store

    Store: TypeAlias = "AzureStore | GCSStore | MemoryStore | S3Store"

ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
READ_AGAIN = timedelta(minutes=5)  # a tool may have renewed the keys of a profile


@lru_cache(maxsize=64)
def open_store(scheme: str, bucket: str) -> Store:
    """The store of `s3://bucket`, `gs://bucket` or `az://container`; one for the process."""
    from obstore.store import AzureStore, GCSStore, S3Store  # noqa: PLC0415

    for name in ENDPOINTS:
        hear(os.environ.get(name, ""))
    if scheme == "s3":
        return S3Store(bucket, **_s3_settings())
    if scheme == "gs":
        return GCSStore(bucket)
    if not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
        raise UsageError(
            f"az://{bucket}: the storage account is not known. Set AZURE_STORAGE_ACCOUNT_NAME."
        )
    return AzureStore(bucket)


def _s3_settings() -> dict[str, Any]:
    config: dict[str, str] = {}
    if _endpoint().startswith("http://"):  # written out by the user, as for a server beside them
        config["aws_allow_http"] = "true"
    profile = _profile()
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys() and "region" in profile:
        config["aws_region"] = profile["region"]
    if os.environ.get("AWS_ACCESS_KEY_ID") or "aws_access_key_id" not in profile:
        return {"config": config}
    return {"config": config, "credential_provider": _keys_of_profile}


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""


def _keys_of_profile() -> S3Credential:
    """The keys of the profile, read again every few minutes."""
    profile = _profile()
    secret, token = profile["aws_secret_access_key"], profile.get("aws_session_token")
    for value in (profile["aws_access_key_id"], secret, token or ""):
        hear_secret(value)
    return {
        "access_key_id": profile["aws_access_key_id"],
        "secret_access_key": secret,
        "token": token,
        "expires_at": datetime.now(UTC) + READ_AGAIN,
    }


def _profile() -> dict[str, str]:
    """The entries of the chosen profile in both files of `~/.aws`; empty without such files."""
    name = os.environ.get("AWS_PROFILE") or "default"
    home = Path.home() / ".aws"
    keys = _section(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", name)
    section = name if name == "default" else f"profile {name}"
    return {**_section(os.environ.get("AWS_CONFIG_FILE") or home / "config", section), **keys}


def _section(path: str | Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeError, OSError) as error:
        # Without its text: the parser's message quotes the line, which may be a key.
        raise UsageError(
            f"{path}: not readable as a file of AWS profiles ({type(error).__name__}). Correct it, "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}
