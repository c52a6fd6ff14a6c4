"""Text that is safe to print: without secrets and terminal control characters.

`masked` is for a value that is stored (a setting, a tag), `redacted` for a message or a traceback,
`shown` for a terminal, and `safe` for a message on a terminal.
"""

from __future__ import annotations

import html
import json
import os
import re
import unicodedata
from functools import cache
from typing import TypeVar
from urllib.parse import quote, unquote

T = TypeVar("T")

MASK = "***"
# Parts of a password are masked too, unless they are shorter than this.
SHORTEST_PART = 2
# Shorter secrets may be parts of other words: they are masked only as whole words.
MASKED_ANYWHERE = 12
LONGEST_NAME = 20  # a user's name that is longer is a token

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]*")
_WHOLE_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
_NAMES = (
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credentials?|authorization|signature)"
)
_QUERY = re.compile(
    rf"([?&;](?:{_NAMES}|pass|pwd|pw|auth|sig|sas|key)=)[^&;#\s'\"]+", re.IGNORECASE
)
_HEADER = re.compile(r"((?:bearer|basic)\s+)[\w+/=.~-]{8,}", re.IGNORECASE)
# A tokenizer's own tokens are not secrets.
_KEY = re.compile(rf"(?!(?:bos|eos|pad|unk|sep|cls|mask)_token){_NAMES}|pwd", re.IGNORECASE)
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{12,}|dapi[0-9a-f]{24,}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|SECRET_ACCESS_KEY|SESSION_TOKEN|API_KEY"
    r"|ACCESS_KEY|ACCESS_KEY_ID|ACCOUNT_KEY|STORAGE_KEY|SAS_KEY|CONNECTION_STRING|CREDENTIALS?)$"
)
SHORTEST_VARIABLE = 6

_secrets: set[str] = set()


def safe(text: str) -> str:
    """The text, safe for a terminal or a log."""
    return shown(redacted(text))


def escape(text: str) -> str:
    """The text, escaped for HTML and its attributes."""
    return html.escape(safe(text))


def shown(text: str) -> str:
    """The text with control and direction characters escaped, except newline and tab."""
    if text.isprintable():
        return text
    return "".join(c if _is_plain(c) else json.dumps(c)[1:-1] for c in text)


def redacted(text: str) -> str:
    """The text without the secrets in addresses and those that this process registered."""
    text = masked(text)
    for secret in sorted((one for one in _known() if one in text), key=len, reverse=True):
        if len(secret) >= MASKED_ANYWHERE:
            text = text.replace(secret, MASK)
        else:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", MASK, text)
    return text


def beginning(text: str, most: int) -> str:
    """The first characters of a text, without a part of a secret at their end."""
    for secret in sorted(_known(), key=len, reverse=True):
        at = text.find(secret, max(0, most - len(secret) + 1), most + len(secret) - 1)
        if at >= 0:
            most = at
    return text[:most]


def masked(value: T) -> T:
    """The value with the secrets of addresses and tokens masked; lists and dicts as well."""
    if isinstance(value, dict):
        return {name: _masked_entry(name, one) for name, one in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        return type(value)(masked(one) for one in value)
    if not isinstance(value, str):
        return value
    if _WHOLE_ADDRESS.fullmatch(value) and not any(map(str.isspace, value)):
        return masked_address(value)  # type: ignore[return-value]
    text = _ADDRESS.sub(lambda found: masked_address(found[0]), value)
    text = _HEADER.sub(rf"\1{MASK}", _QUERY.sub(rf"\1{MASK}", text))
    return _TOKENS.sub(MASK, text)  # type: ignore[return-value]


def masked_address(address: str) -> str:
    """The address with its user, password, query and fragment masked."""
    scheme, _, rest = address.partition("://")
    user, host = _parted(scheme, rest)
    if set(user) & set("?#"):  # it is unclear where the password ends
        return f"{scheme}://{MASK}"
    host, _, fragment = host.partition("#")
    host, _, query = host.partition("?")
    pairs = [f"{pair.partition('=')[0]}={MASK}" for pair in re.split("[&;]", query) if pair]
    shortened = f"{scheme}://{f'{MASK}@' if user else ''}{_TOKENS.sub(MASK, host)}"
    return f"{shortened}{'?' if pairs else ''}{'&'.join(pairs)}{f'#{MASK}' if fragment else ''}"


def mask_secrets_of(address: str) -> None:
    """Registers the secrets of an address, to be masked from now on, whole and in parts."""
    if not _WHOLE_ADDRESS.fullmatch(address):
        return
    scheme, _, rest = address.partition("://")
    user, host = _parted(scheme, rest)
    name, colon, password = user.partition(":")
    found = [password] if colon else [name]
    if len(name) > LONGEST_NAME:
        found.append(name)
    _, _, query = host.partition("?")
    values = (pair.partition("=") for pair in re.split("[&;]", query.partition("#")[0]))
    found += [value for key, _, value in values if _QUERY.match(f"?{key}={value}")]
    found.append(host.partition("#")[2])
    for secret in found:
        _secrets.update(_pieces(secret))


def mask_secret(secret: str) -> None:
    """Registers a secret, to be masked from now on, raw and URL-quoted."""
    _secrets.update(
        one for one in (secret, quote(secret, safe="")) if len(one) >= SHORTEST_VARIABLE
    )


def bare_address(address: str) -> str:
    """The address without user, password, query and fragment."""
    scheme, slashes, rest = address.partition("://") if "://" in address else ("", "", address)
    _, host = _parted(scheme, rest)
    host = host.partition("?")[0]
    return f"{scheme}{slashes}{host if host.startswith('/') else host.partition('#')[0]}"


def _parted(scheme: str, rest: str) -> tuple[str, str]:
    """The user info before the host, and the rest; a password may contain any character."""
    if rest.startswith("/") or scheme == "hf":  # a file, or a repository with its revision
        return "", rest
    user, _, host = rest.rpartition("@")
    return user, host


def _masked_entry(name: object, value: T) -> T | str:
    if isinstance(value, str) and value and _KEY.fullmatch(str(name)):
        return MASK
    return masked(value)


def _pieces(secret: str) -> set[str]:
    """A secret, raw and decoded, and the parts that a parser may cut it into."""
    whole = {secret, unquote(secret)}
    parts = {part for one in whole for part in re.split(r"[/?#:@&=\\\[\]]", one)}
    return {one for one in whole | parts if len(one) >= SHORTEST_PART}


def _known() -> set[str]:
    """The secrets that this process registered, and those of its current environment."""
    # Names are looked at first: to read a value costs more, and few names are of secrets.
    values = (os.environ.get(name, "") for name in os.environ if _names_a_secret(name))
    return _secrets.union(value for value in values if len(value) >= SHORTEST_VARIABLE)


@cache
def _names_a_secret(variable: str) -> bool:
    """Whether the name of a variable marks its value as a secret; each message asks again."""
    return bool(_VARIABLE.search(variable))


def _is_plain(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def is_plain_name(name: object) -> bool:
    """Whether this is a file or folder name and, on any system, not a path to elsewhere."""
    return (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and name.isprintable()
        and not {"/", "\\"} & {*name}
    )


def is_plain_path(path: str) -> bool:
    """Whether all parts of a path, joined by slashes, are plain names."""
    return all(map(is_plain_name, path.split("/")))
