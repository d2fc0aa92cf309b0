"""Which hosts no proxy outside can reach."""

from __future__ import annotations

from ipaddress import ip_address

_OWN_NAMES = (".svc", ".local", ".localhost", ".internal")  # of a cluster or of a company's network


def is_near(host: str) -> bool:
    """Whether this is a host of the own network: by a private or loopback address, or by its name."""
    try:
        address = ip_address(host)
    except ValueError:
        return "." not in host or host.lower().rstrip(".").endswith(_OWN_NAMES)
    return address.is_private or address.is_loopback or address.is_link_local
