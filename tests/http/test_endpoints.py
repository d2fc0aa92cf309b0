"""The table of endpoints: what routers serve is all of it but the nodes' own."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args, get_type_hints

import pytest

from pd_cluster.server.app import WORKS
from pd_cluster.server.routes.openapi import ANSWERS, BODIES
from pd_connectors.protocol.ticket import NodeOrder
from pd_http.endpoints import ENDPOINTS, NODE_ACTIONS, Kind, paths_of
from pd_router.app import create_app
from pd_router.config import RouterConfig

NAMES = {one.name: one.kind for one in ENDPOINTS}


@pytest.mark.parametrize("dashboard", ["off", "local"])
def test_a_router_serves_all_but_the_nodes_own(dashboard: str) -> None:
    routes: Any = create_app(RouterConfig(start_empty=True, dashboard=dashboard), b"k" * 32).routes
    served = {(method, one.path) for one in routes for method in one.methods - {"HEAD"}}
    ours = [one for one in ENDPOINTS if one.kind is not Kind.NODE]
    if dashboard == "off":
        ours = [one for one in ours if not one.path.startswith("/dashboard")]
    assert served == {(one.method, one.path) for one in ours}
    assert all(one.endpoint is not None for one in routes)


def test_no_two_endpoints_are_the_same() -> None:
    assert Counter((one.method, one.template) for one in ENDPOINTS).most_common(1)[0][1] == 1
    assert all(one.kind is NAMES[one.name] for one in ENDPOINTS), "one name is one kind"


def test_what_nodes_know_by_name_is_in_the_table() -> None:
    assert WORKS.keys() | BODIES.keys() | ANSWERS.keys() <= NAMES.keys()
    assert WORKS.keys() == {name for name, kind in NAMES.items() if kind in (Kind.GENERATE, Kind.READ)}
    assert WORKS.keys() <= BODIES.keys()


def test_orders_to_all_nodes_are_actions_of_orders() -> None:
    assert set(NODE_ACTIONS.values()) <= set(get_args(get_type_hints(NodeOrder)["action"]))
    assert tuple(NODE_ACTIONS) == paths_of(Kind.ORDER)
