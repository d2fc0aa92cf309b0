"""The address of a pool's server. Imports neither torch nor the pool's package, so a bad URL is refused at once."""

from __future__ import annotations

from pd_connectors.protocol.errors import ConnectorUnavailable

DEFAULT_URLS = {"lmcache": "lm://127.0.0.1:6500", "mooncake": "mooncake://127.0.0.1:50051"}  # by connector


def read_pool_url(url: str, default_url: str) -> tuple[str, int]:
    """Host and port in `url`, or in `default_url` when it is empty. Both have the same scheme.

    An IPv6 address is written in brackets and returned without them. Raises ConnectorUnavailable for other URLs.
    """
    url = url or default_url
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != default_url.partition("://")[0] or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConnectorUnavailable(f"the pool needs a URL like {default_url}, not {url!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
