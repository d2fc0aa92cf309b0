"""Builds the router: `create_app` makes every part; the lifespan starts and stops what runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from starlette.applications import Starlette
from starlette.routing import Route

from pd_http.cross_origin import cross_origin
from pd_http.endpoints import ENDPOINTS, Kind, methods_of
from pd_http.exception_handlers import exception_handlers
from pd_http.held_bytes import HeldBytes
from pd_router.admission.key_admission import KeyAdmission
from pd_router.admission.key_file import KeyFile
from pd_router.calls import headers as rules
from pd_router.edge.cluster_orders import ClusterOrders
from pd_router.edge.control import Control, Relay
from pd_router.edge.dashboard import Dashboard
from pd_router.edge.node_orders import Admin
from pd_router.edge.openapi import router_document
from pd_router.edge.proxy import Proxy
from pd_router.edge.role_orders import RoleOrders
from pd_router.edge.worker_views import WorkerViews
from pd_router.edge.workers import OnlyWorker
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.upstream import Upstream
from pd_router.policy.cost_policy import CostPolicy
from pd_router.records.metrics import RouterMetrics
from pd_router.records.otlp import make_exporter
from pd_router.records.recent_requests import RecentRequests
from pd_router.records.request_sinks import RequestSinks
from pd_router.records.slo import Slo
from pd_router.requests.background import Background
from pd_router.requests.services import Services
from pd_router.sources.discovery import Discovery
from pd_router.sources.posted import PostedNodes
from pd_router.watch.feed_follower import FeedFollower
from pd_router.watch.health import HealthPoller
from pd_router.watch.node_tasks import NodeTasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.requests import Request

    from pd_router.config import RouterConfig
    from pd_router.process.worker_channel import WorkerChannel
    from pd_router.sources.base import NodeSource
    from pd_router.sources.node_change import RestartState

    Door: TypeAlias = Callable[[Services], contextlib.AbstractAsyncContextManager[object]]

# For releasing tickets and finishing prefills when the router stops; leases that are left expire by themselves.
BACKGROUND_DEADLINE_S = 2.0


def create_app(
    config: RouterConfig,
    key: bytes,
    sources: Sequence[NodeSource] = (),
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    restart_state: RestartState | None = None,
    worker: WorkerChannel | None = None,
    doors: Sequence[Door] = (),
) -> Starlette:
    """The router as an ASGI app, without the calls that compute: `token_path(app.state.proxy)` serves those.

    `key`: the cluster's key; it signs offers. `sources`: of nodes, in addition to flags and posted orders.
    `restart_state`: the orders that the router before this one had. `worker`: of a router with several.
    `doors`: other ports by which requests come; open from the first health checks on until the app ends.
    `clock`: monotonic seconds. `wall_clock`: Unix seconds.
    """
    table = NodeTable(config, clock)
    upstream = Upstream(config)
    background = Background()
    metrics = RouterMetrics(table, Slo(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3))
    export = make_exporter(config.otlp_url) if config.otlp_url else None
    sinks = RequestSinks(config, metrics, export)
    recent = RecentRequests(clock)
    keys = KeyFile(config.api_keys) if config.api_keys else None
    admission = None if keys is None else KeyAdmission(config, table, metrics, keys.ring)
    held = HeldBytes(config.max_held_bytes)
    metrics.http.export_held(held)
    services = Services(
        config, table, CostPolicy(config), upstream, metrics, background, sinks, recent, key, wall_clock, held,
        admission,
    )  # fmt: skip
    poller = HealthPoller(config, table, upstream)
    feeds = FeedFollower(table, upstream, services.metrics, key, wall_clock)
    discovery = Discovery(sources, table)
    metrics.export_sources(discovery.followed)
    posted = PostedNodes(table, key, wall_clock)
    posted.known = discovery.known

    def adopt(state: RestartState) -> None:
        discovery.restore(state.known)  # first: some of them may be drained
        posted.adopt(state)

    workers = worker or OnlyWorker(posted)
    views = WorkerViews(table, services.metrics, workers)
    dashboard = Dashboard(services, views, workers)
    if worker is not None:
        metrics.frozen_workers.inc(worker.num_frozen)
        worker.adopt, worker.topics = adopt, views.topics | dashboard.topics

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with upstream:
            running = [asyncio.ensure_future(discovery.run())]
            try:
                await discovery.received_all(config.control_timeout_s)
                if worker is not None:
                    running.append(asyncio.ensure_future(worker.run()))
                    await worker.adopted()
                elif restart_state is not None:
                    adopt(restart_state)  # before the first health check, which finds restarted nodes
                await poller.poll_all()  # so that the first request finds the healthy nodes
                running.append(asyncio.ensure_future(NodeTasks(table, poller.follow, feeds.follow).run()))
                if keys is not None and admission is not None:
                    count = metrics.key_files.labels
                    follow = keys.follow(admission.adopt, lambda result: count(result).inc())
                    running.append(asyncio.ensure_future(follow))
                    if worker is not None:
                        worker.receive_usage = admission.receive_usage
                        running.append(asyncio.ensure_future(admission.share_usage(worker.share)))
                if worker is not None:
                    await worker.ready()
                    discovery.tell(worker.know)
                async with contextlib.AsyncExitStack() as stack:
                    for door in doors:
                        await stack.enter_async_context(door(services))
                    yield
            finally:
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
                await background.close(BACKGROUND_DEADLINE_S)
                await asyncio.to_thread(sinks.close)

    app = Starlette(
        routes=_routes(services, posted, Admin(posted, workers, views, poller.poll), views, dashboard),
        middleware=cross_origin(config),
        exception_handlers=exception_handlers(_request_id),
        lifespan=lifespan,
    )
    app.state.services = services
    app.state.proxy = Proxy(services)
    app.state.posted = posted
    return app


def _routes(
    services: Services, posted: PostedNodes, admin: Admin, views: WorkerViews, dashboard: Dashboard
) -> list[Route]:
    control = Control(services, views)
    by_kind: dict[Kind, Any] = {
        Kind.GENERATE: _compute,
        Kind.READ: _compute,
        Kind.META: Relay(services),
        Kind.ORDER: ClusterOrders(services, posted).give,
    }
    by_name: dict[str, Any] = {
        "health": control.health,
        "version": control.version,
        "load": control.load,
        "metrics": control.metrics,
        "nodes": control.nodes,
        "add": admin.add,
        "remove": admin.remove,
        "drain": admin.drain,
        "resume": admin.resume,
        "order_role": RoleOrders(services, posted, views).give,
    } | dashboard.handlers
    served = [one for one in ENDPOINTS if one.kind in by_kind or one.name in by_name]
    is_open = services.config.admin_endpoints == "open"
    by_name["openapi"] = Relay(services, partial(router_document, served, is_open))
    return [Route(one.path, by_name.get(one.name) or by_kind[one.kind], methods=methods_of(one)) for one in served]


async def _compute(request: Request) -> NoReturn:
    raise AssertionError("ClientConnection serves these paths; the routes are for the document and for other methods")


def _request_id(request: Request) -> dict[str, str]:
    return {rules.REQUEST_ID: rules.request_id(rules.first_values(request.scope["headers"]))}
