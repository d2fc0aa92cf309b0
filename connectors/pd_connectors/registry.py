"""Connectors by name. Backends are imported only when asked for: they are optional and slow to load."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pd_connectors.base import Connector, ConnectorContext
from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTORS = {
    "nixl": "pd_connectors.nixl.connector:NixlConnector",
    "lmcache": "pd_connectors.lmcache:LMCacheConnector",
    "mooncake": "pd_connectors.mooncake:MooncakeConnector",
    "loopback": "pd_connectors.loopback:LoopbackConnector",
    "none": "pd_connectors.null:NullConnector",
}


def create_connector(name: str, context: ConnectorContext) -> Connector:
    """The connector `name`: one of CONNECTORS, or `package.module:Class` (called with the context).

    Raises ConnectorUnavailable when there is no such connector, or its backend is missing or does not start.
    """
    path = CONNECTORS.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        known = ", ".join(CONNECTORS)
        raise ConnectorUnavailable(f"no connector is called {name!r}; known: {known}, or package.module:Class")
    try:
        kind = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConnectorUnavailable(f"cannot import connector {path!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Connector)):
        raise ConnectorUnavailable(f"{path!r} is no subclass of pd_connectors.base.Connector")
    build: Callable[[ConnectorContext], Connector] = kind  # a subclass may take nothing but the context
    return build(context)
