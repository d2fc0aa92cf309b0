"""Names that nodes and routers tell each other, and that enter headers, logs and metrics."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeGuard

from pd_http.connection_table import network_of

MAX_NAME_CHARS = 256  # of a node or a model; a pod's has 253 at most
CLIENT_HEADER = "x-pd-client"  # of a request to a node; routers drop what clients send under this name


def is_name(value: object) -> TypeGuard[str]:
    """Whether it is a text that is safe in a header, and not longer than a name may be."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and value.isascii() and value.isprintable()


def plain_text(text: str, most: int) -> str:
    """At most `most` characters of a text of another process, on one line: it enters logs and pages."""
    return "".join(char if char.isprintable() else " " for char in text[:most])


@lru_cache(4096)  # 5 us for an address of IPv6
def client_name(key_name: str, host: str) -> str:
    """A client, where its work at nodes could delay that of others. By its API key; without keys by its address."""
    return f"key:{key_name}" if key_name else f"net:{network_of(host)}"
