"""Builds the router: `create_app` makes every part; `Lifespan` starts and stops what runs."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.applications import Starlette
from starlette.routing import Route

from pd_http.cross_origin import cross_origin
from pd_http.endpoints import ENDPOINTS, Kind, methods_of
from pd_http.exception_handlers import exception_handlers
from pd_http.held_bytes import HeldBytes
from pd_router.admission.key_admission import KeyAdmission
from pd_router.admission.key_file import KeyFile
from pd_router.calls import headers as rules
from pd_router.edge.balance_board import BalanceBoard
from pd_router.edge.cluster_adapters import ADAPTERS, ClusterAdapters
from pd_router.edge.cluster_orders import ClusterOrders
from pd_router.edge.control import Control, Relay
from pd_router.edge.dashboard import Dashboard
from pd_router.edge.node_orders import Admin
from pd_router.edge.openapi import router_document
from pd_router.edge.proxy import Proxy
from pd_router.edge.role_orders import RoleOrders
from pd_router.edge.worker_views import WorkerViews
from pd_router.edge.workers import OnlyWorker
from pd_router.lifespan import Lifespan
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
from pd_router.watch.adapter_keeper import AdapterKeeper
from pd_router.watch.feed_follower import FeedFollower
from pd_router.watch.health import HealthPoller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request

    from pd_router.config import RouterConfig
    from pd_router.lifespan import RequestPort
    from pd_router.process.worker_channel import WorkerChannel
    from pd_router.sources.base import NodeSource
    from pd_router.sources.node_change import RestartState


def create_app(
    config: RouterConfig,
    key: bytes,
    sources: Sequence[NodeSource] = (),
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    restart_state: RestartState | None = None,
    worker: WorkerChannel | None = None,
    ports: Sequence[RequestPort] = (),
) -> Starlette:
    """The router as an ASGI app, without the calls that compute: `token_path(app.state.proxy)` serves those.

    `key`: the cluster's key; it signs offers. `sources`: of nodes, in addition to flags and posted orders.
    `restart_state`: the orders that the router before this one had. `worker`: of a router with several.
    `ports`: other ports by which requests come; open from the first health checks on until the app ends.
    `clock`: monotonic seconds. `wall_clock`: Unix seconds.
    """
    keys = KeyFile(config.api_keys) if config.api_keys else None
    services = _services(config, key, keys, clock, wall_clock)
    table, upstream, metrics = services.table, services.upstream, services.metrics
    poller = HealthPoller(config, table, upstream)
    feeds = FeedFollower(table, upstream, metrics, key, wall_clock)
    adapters = AdapterKeeper(table, upstream, key, wall_clock)
    discovery = Discovery(sources, table)
    metrics.export_sources(discovery.followed)
    posted = PostedNodes(table, key, wall_clock)
    posted.known = discovery.known
    lifespan = Lifespan(services, discovery, posted, poller, feeds, adapters, keys, worker, restart_state, ports)
    workers = worker or OnlyWorker(posted)
    views = WorkerViews(table, metrics, workers)
    board = BalanceBoard(services, posted, views, workers)
    dashboard = Dashboard(services, views, workers, board.word)
    orders = ClusterOrders(services, posted)
    cluster_adapters = ClusterAdapters(services, orders, adapters, workers)
    if worker is not None:
        metrics.frozen_workers.inc(worker.num_frozen)
        worker.adopt, worker.topics = lifespan.adopt, views.topics | dashboard.topics | board.topics
        worker.topics[ADAPTERS] = cluster_adapters.stamps
    admin = Admin(posted, workers, views, poller.poll)
    app = Starlette(
        routes=_routes(services, posted, admin, views, dashboard, orders, cluster_adapters, board),
        middleware=cross_origin(config),
        exception_handlers=exception_handlers(_request_id),
        lifespan=lifespan.run,
    )
    app.state.services = services
    app.state.proxy = Proxy(services)
    app.state.posted = posted
    return app


def _services(
    config: RouterConfig, key: bytes, keys: KeyFile | None, clock: Callable[[], float], wall_clock: Callable[[], float]
) -> Services:
    """`keys`: of clients; None: every client may use the router."""
    table = NodeTable(config, clock)
    metrics = RouterMetrics(table, Slo(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3))
    held = HeldBytes(config.max_held_bytes)
    metrics.http.export_held(held)
    export = make_exporter(config.otlp_url) if config.otlp_url else None
    admission = None if keys is None else KeyAdmission(config, table, metrics, keys.ring)
    return Services(
        config, table, CostPolicy(config), Upstream(config), metrics, Background(),
        RequestSinks(config, metrics, export), RecentRequests(clock), key, wall_clock, held, admission,
    )  # fmt: skip


def _routes(
    services: Services, posted: PostedNodes, admin: Admin, views: WorkerViews, dashboard: Dashboard,
    orders: ClusterOrders, adapters: ClusterAdapters, board: BalanceBoard,
) -> list[Route]:  # fmt: skip
    control = Control(services, views, board.word)
    by_kind: dict[Kind, Any] = {
        Kind.GENERATE: _compute,
        Kind.READ: _compute,
        Kind.META: Relay(services),
        Kind.ORDER: orders.give,
        Kind.ADAPTER: adapters.give,
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
        "balance": board.hear,
    } | dashboard.handlers
    served = [one for one in ENDPOINTS if one.kind in by_kind or one.name in by_name]
    is_open = services.config.admin_endpoints == "open"
    by_name["openapi"] = Relay(services, partial(router_document, served, is_open))
    return [Route(one.path, by_name.get(one.name) or by_kind[one.kind], methods=methods_of(one)) for one in served]


async def _compute(request: Request) -> NoReturn:
    raise AssertionError("ClientConnection serves these paths; the routes are for the document and for other methods")


def _request_id(request: Request) -> dict[str, str]:
    return {rules.REQUEST_ID: rules.request_id(rules.first_values(request.scope["headers"]))}
