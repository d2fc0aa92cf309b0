"""Connectors by name. Backends are imported only when asked for: they are optional and slow to load."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pd_connectors.base import API_VERSION, Connector, ConnectorContext
from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.base import CacheDescription, Closes
    from pd_connectors.rank_port import RankPort

CONNECTORS = {
    "nixl": "pd_connectors.nixl.connector:NixlConnector",
    "lmcache": "pd_connectors.lmcache:LMCacheConnector",
    "mooncake": "pd_connectors.mooncake:MooncakeConnector",
    "loopback": "pd_connectors.loopback:LoopbackConnector",
    "none": "pd_connectors.null:NullConnector",
}


# The package that a connector requires: its module, and the extra that installs it.
PACKAGES = {"nixl": ("nixl_cu13", "nixl"), "lmcache": ("lmcache", "lmcache"), "mooncake": ("mooncake", "mooncake")}


def check_connector(name: str, has_module: Callable[[str], bool]) -> None:
    """Raises ConnectorUnavailable for a connector that cannot be created. Imports none, so it costs no time.

    has_module: whether a module can be found, by its full name.
    """
    module_name, _ = _place_of(name)
    if not has_module(module_name):
        raise ConnectorUnavailable(f"connector {name!r}: there is no module {module_name}")
    module, extra = PACKAGES.get(name, ("", ""))
    if module and not has_module(module):
        raise ConnectorUnavailable(f"connector {name!r} needs a missing package: pip install 'pd-cluster[{extra}]'")


def create_connector(name: str, context: ConnectorContext) -> Connector:
    """The connector `name`: one of CONNECTORS, or `package.module:Class` (called with the context).

    Raises ConnectorUnavailable when there is no such connector, or its backend is missing or does not start.
    """
    build: Callable[[ConnectorContext], Connector] = _class_of(name)  # a subclass may take nothing but the context
    return build(context)


def rank_reader(name: str, context: ConnectorContext, cache: CacheDescription, port: RankPort) -> Closes | None:
    """What the connector `name` needs in the process of rank `context.rank`, to be closed there; None: nothing.

    cache: of that rank. port: to rank 0. Raises ConnectorUnavailable as `create_connector` does, and when the connector
    moves the KV of one rank only.
    """
    return _class_of(name).serve_rank(context, cache, port)


def _class_of(name: str) -> type[Connector]:
    module_name, class_name = _place_of(name)
    path = f"{module_name}:{class_name}"
    try:
        kind = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConnectorUnavailable(f"cannot import connector {path!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Connector)):
        raise ConnectorUnavailable(f"{path!r} is no subclass of pd_connectors.base.Connector")
    if kind.api_version != API_VERSION:
        raise ConnectorUnavailable(
            f"{path!r} has api_version {kind.api_version}, this node {API_VERSION}; see pd_connectors.base"
        )
    return kind


def _place_of(name: str) -> tuple[str, str]:
    """Module and class of a connector. Raises ConnectorUnavailable for an unknown name."""
    module_name, colon, class_name = CONNECTORS.get(name, name).partition(":")
    if not (colon and module_name and class_name):
        known = ", ".join(CONNECTORS)
        raise ConnectorUnavailable(f"no connector is called {name!r}; known: {known}, or package.module:Class")
    return module_name, class_name
