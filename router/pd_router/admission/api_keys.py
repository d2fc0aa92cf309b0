"""The API keys of clients: entries of a file, found by the hash of what a client sends. Pure: no IO.

A key is 32 random bytes, so one SHA-256 of it cannot be searched backwards; a slow hash is for passwords. A key is
found by its hash: the time of the look-up tells nothing about other keys.
"""

from __future__ import annotations

import math
import re
import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pd_http.reply import HeaderList

KEY_BYTES = 32
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_NAME = re.compile(r"[A-Za-z0-9._\-]{1,64}")
_SALT = re.compile(r"[A-Za-z0-9._\-]{0,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEARER = b"bearer "


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file. Limits of 0 do not limit. Several hashes: an old and a new key, while clients change."""

    name: str  # in logs and metrics
    sha256: str | tuple[str, ...]  # of the key, hexadecimal
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0  # of prompts and answers
    concurrency: int = 0  # requests under way at once
    weight: float = 1.0  # share of the nodes, beside other keys that wait
    priority: int = 0  # of the nodes' queues, lower is served first; a request may only ask for a higher number
    adapters: tuple[str, ...] | None = None  # names that it may use; None: all
    salt: str | None = None  # keys with equal ones share cached prefixes. None: the name

    @property
    def digests(self) -> tuple[str, ...]:
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256

    def salted(self, given: str) -> str:
        """The `cache_salt` of a request that asks for the salt `given`. No request of another tenant has the same.

        A tenant's name has no slash, so the first slash ends it. "": no salt, among keys with the salt "".
        """
        tenant = self.name if self.salt is None else self.salt
        return f"{tenant}/{given}" if tenant or given else ""


class KeyRing:
    """The keys of a file."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        """Raises ValueError if names or hashes repeat, a name is another key's salt, by which both would share cached
        prefixes, or there is no key: that would refuse every client.
        """
        self.by_name = {key.name: key for key in keys}
        self._by_digest = {bytes.fromhex(digest): key for key in keys for digest in key.digests}
        if not keys:
            raise ValueError("there is no key")
        if len(self.by_name) < len(keys):
            raise ValueError("a name is given twice")
        if {key.name for key in keys if key.salt is None} & {key.salt for key in keys}:
            raise ValueError("a name is another key's salt: give the key of that name a salt, too")
        if len(self._by_digest) < sum(len(key.digests) for key in keys):
            raise ValueError("a hash is given twice")

    def find(self, headers: HeaderList) -> ApiKey | None:
        """The key that a request names: `authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients do."""
        for name, value in headers:
            if name in KEY_HEADERS:
                given = value if name == b"x-api-key" else value[7:] if value[:7].lower() == _BEARER else b""
                if (key := self._by_digest.get(sha256(given.strip()).digest())) is not None:
                    return key
        return None


def parse_keys(content: bytes) -> KeyRing:
    """A line of JSON a key; blank lines and lines that begin with # do not count.

    Raises ValueError. It names lines and fields and never repeats what is written there: it may be a key.
    """
    keys = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip() and not line.lstrip().startswith(b"#"):
            try:
                keys.append(_parse(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from None
    return KeyRing(tuple(keys))


def _parse(line: bytes) -> ApiKey:
    key = msgspec.json.decode(line, type=ApiKey)
    limits = key.requests_per_minute, key.tokens_per_minute, key.concurrency
    wrong = {
        "name": not _NAME.fullmatch(key.name),
        "sha256": not key.digests or not all(_DIGEST.fullmatch(digest) for digest in key.digests),
        "salt": not _SALT.fullmatch(key.salt or ""),
        "weight": not 0.001 <= key.weight <= 1000,
        "priority": not -(1 << 31) <= key.priority < 1 << 31,
        "limits": min(limits) < 0 or not all(math.isfinite(limit) for limit in limits),
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{field} is not valid")
    return key


def new_key(name: str) -> tuple[str, str]:
    """(a new key, its line for the file). Raises ValueError."""
    key = f"pd-{secrets.token_urlsafe(KEY_BYTES)}"
    line = msgspec.json.encode({"name": name, "sha256": sha256(key.encode()).hexdigest()})
    parse_keys(line)
    return key, line.decode()
