"""Builds the router: `create_app` makes every part; the lifespan starts and stops what runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Route

from pd_http.exception_handlers import exception_handlers
from pd_router import headers as rules
from pd_router.background import Background
from pd_router.control import Control, Relay
from pd_router.discovery import Discovery
from pd_router.health import HealthPoller
from pd_router.metrics import RouterMetrics
from pd_router.node_orders import Admin
from pd_router.node_table import NodeTable
from pd_router.proxy import Proxy
from pd_router.routed_request import Services
from pd_router.sources.posted import PostedNodes
from pd_router.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.requests import Request

    from pd_router.config import RouterConfig
    from pd_router.sources.base import NodeSource
    from pd_router.succession import Heritage

# For releasing tickets and finishing prefills when the router stops; leases that are left expire by themselves.
BACKGROUND_DEADLINE_S = 2.0


def create_app(
    config: RouterConfig,
    key: bytes,
    sources: Sequence[NodeSource] = (),
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    heritage: Heritage | None = None,
) -> Starlette:
    """The router as an ASGI app.

    `key`: the cluster's key; it signs offers. `sources`: of nodes, in addition to flags and posted orders.
    `heritage`: the orders that the router before this one had. `clock`: monotonic seconds. `wall_clock`: Unix seconds.
    """
    table = NodeTable(config, clock)
    upstream = Upstream(config)
    background = Background()
    services = Services(config, table, upstream, RouterMetrics(table), background, key, wall_clock)
    poller = HealthPoller(config, table, upstream)
    discovery = Discovery(sources, table)
    posted = PostedNodes(table, key, wall_clock)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with upstream:
            running = [asyncio.ensure_future(discovery.run())]
            try:
                await discovery.heard_all(config.control_timeout_s)
                if heritage is not None:
                    posted.inherit(heritage)  # before the first health check, which finds restarted nodes
                await poller.poll_all()  # so that the first request finds the healthy nodes
                running.append(asyncio.ensure_future(poller.run()))
                yield
            finally:
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
                await background.close(BACKGROUND_DEADLINE_S)

    proxy, relay, control = Proxy(services), Relay(services), Control(services)
    admin = Admin(table, posted)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", proxy, methods=["POST"]),
            Route("/v1/completions", proxy, methods=["POST"]),
            Route("/v1/models", relay, methods=["GET"]),
            Route("/v1/models/{name:path}", relay, methods=["GET"]),
            Route("/tokenize", relay, methods=["POST"]),
            Route("/detokenize", relay, methods=["POST"]),
            Route("/health", control.health),
            Route("/metrics", control.metrics),
            Route("/nodes", control.nodes, methods=["GET"]),
            Route("/nodes", admin.add, methods=["POST"]),
            Route("/nodes/{id}", admin.remove, methods=["DELETE"]),
            Route("/nodes/{id}/drain", admin.drain, methods=["POST"]),
            Route("/nodes/{id}/drain", admin.resume, methods=["DELETE"]),
        ],
        exception_handlers=exception_handlers(_request_id),
        lifespan=lifespan,
    )
    app.state.services = services
    app.state.posted = posted
    return app


def _request_id(request: Request) -> dict[str, str]:
    return {rules.REQUEST_ID: rules.request_id(rules.first_values(request.scope["headers"]))}
