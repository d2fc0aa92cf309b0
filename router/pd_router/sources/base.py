"""The protocol of node sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pd_http.errors import StartupError
from pd_router.config import check_node_url
from pd_router.nodes.node import NodeSpec, Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@dataclass(frozen=True, slots=True)
class NamedNode:
    """A node as a source names it. `instance`: what runs there, a pod's UID; another one at this URL is another node.

    `is_ready`: the source lets requests in. It admits a node and expels none (`membership.py`).
    """

    spec: NodeSpec
    instance: str = ""
    is_ready: bool = True

    @property
    def key(self) -> tuple[str, str]:
        return self.spec.url, self.instance


@dataclass(frozen=True, slots=True)
class Roster:
    """What a source says at one time. `ended`: the keys of nodes of which it knows the end, not only an absence.

    `is_whole`: read as a whole, and not the reading before with a change: only then an absence says something.
    """

    nodes: tuple[NamedNode, ...]
    ended: frozenset[tuple[str, str]] = frozenset()
    is_whole: bool = True


class NodeSource(Protocol):
    """Names nodes. `name`: the source in logs, metrics and `GET /nodes`."""

    name: str

    def watch(self) -> AsyncGenerator[Roster, None]:
        """All nodes of the source, whenever it has been read, changed or not, until the generator is closed.

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


def is_logged(number: int) -> bool:
    """Whether the log tells the `number`th failure in a row: the first, then ever fewer (16 of a day's 43,200)."""
    return number & (number - 1) == 0
