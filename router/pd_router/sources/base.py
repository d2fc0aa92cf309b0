"""The protocol of node sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd_http.errors import StartupError
from pd_router.config import check_node_url
from pd_router.node_table import NodeSpec, Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class NodeSource(Protocol):
    """Names nodes. `name`: the source in logs and `GET /nodes`."""

    name: str

    def watch(self) -> AsyncGenerator[tuple[NodeSpec, ...], None]:
        """All nodes of the source, as soon as they are known and after each change, until the generator is closed.

        Faults outside this process (no file, no API server) are logged and waited for; the last set stays valid.
        """
        ...


def make_spec(url: str, role: str, node_id: str = "") -> NodeSpec:
    """Raises ValueError if the URL or the role is wrong."""
    try:
        check_node_url(url)
    except StartupError as error:
        raise ValueError(str(error)) from error
    if role not in tuple(Role):
        raise ValueError(f"bad role {role!r} of {url}: write one of {', '.join(Role)}")
    return NodeSpec(url.rstrip("/"), Role(role), node_id)
