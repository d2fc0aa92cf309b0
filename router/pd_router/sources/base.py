"""What every source of nodes does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd_http.errors import StartupError
from pd_router.config import check_node_url
from pd_router.node_table import NodeSpec, Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class NodeSource(Protocol):
    """Names nodes. `name` is what logs and `GET /nodes` call it."""

    name: str

    def watch(self) -> AsyncGenerator[tuple[NodeSpec, ...], None]:
        """All its nodes, first as soon as they are known and again whenever they change, until it is closed.

        What is wrong out there (no file, no API server) is logged and waited for; meanwhile the last set stands.
        """
        ...


def make_spec(url: str, role: str, node_id: str = "") -> NodeSpec:
    """Raises ValueError, which says what is wrong with the URL or the role."""
    try:
        check_node_url(url)
    except StartupError as error:
        raise ValueError(str(error)) from error
    if role not in tuple(Role):
        raise ValueError(f"bad role {role!r} of {url}: write one of {', '.join(Role)}")
    return NodeSpec(url.rstrip("/"), Role(role), node_id)
