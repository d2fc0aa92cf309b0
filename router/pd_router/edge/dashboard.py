"""`GET /dashboard`: a page that shows nodes, handoffs and recent requests. It reads `/dashboard/state` each second.

All watchers of a process share one snapshot a second, and nothing is computed while none asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from importlib.resources import files
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from pd_http.reply import json_response
from pd_router.errors import DashboardClosed, TooManyWatchers
from pd_router.records.recent_requests import RecentPart, summary

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from pd_router.edge.worker_views import WorkerViews
    from pd_router.edge.workers import Workers
    from pd_router.requests.services import Services

RECENT = "recent"  # topic of `Workers.ask`
INTERVAL_S = 1.0  # between two snapshots
MAX_WATCHERS = 16  # answers of one snapshot, which has 90 kB for 100 nodes
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_OF_OTHERS = ("origin", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")  # headers
_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Dashboard:
    """Its handlers by the name of the endpoint, and what other workers ask this one for it."""

    def __init__(
        self, services: Services, views: WorkerViews, workers: Workers,
        word: Callable[[], Awaitable[dict[str, Any] | None]],
    ) -> None:  # fmt: skip
        self._s = services
        self._views = views
        self._workers = workers
        self._word = word  # what a balance said last
        self._page = files("pd_router").joinpath("dashboard.html").read_bytes()
        self._policy = content_policy(self._page.decode())
        self._shared = SharedSnapshot(self._snapshot, services.table.clock)
        self.topics = {RECENT: self._part}
        served = services.config.dashboard != "off"
        self.handlers = {"dashboard": self.page, "dashboard_state": self.state} if served else {}

    async def page(self, request: Request) -> Response:
        self._check(request)
        headers = {**_HEADERS, "content-security-policy": self._policy}
        return Response(self._page, headers=headers, media_type="text/html")

    async def state(self, request: Request) -> Response:
        """The newest snapshot, for the page of the same release: its fields may change."""
        self._check(request)
        try:
            return Response(await self._shared.get(), headers=_HEADERS, media_type="application/json")
        except TooManyWatchers as error:
            return json_response(error.to_body(), error.status, {**_HEADERS, "retry-after": "5"})

    def _check(self, request: Request) -> None:
        """Raises DashboardClosed."""
        peer = request.client.host if request.client is not None else ""
        if self._s.config.dashboard == "local" and not is_local(peer, request.headers):
            raise DashboardClosed(
                "the dashboard is for this machine only: open http://localhost through ssh -L or kubectl port-forward, "
                "or start the router with --dashboard open"
            )

    async def _snapshot(self) -> bytes:
        others, nodes = await asyncio.gather(self._workers.ask(RECENT), self._views.nodes())
        reported = [msgspec.convert(other, RecentPart) for other in others.values() if other is not None]
        state = {
            "at_s": self._s.wall_clock(),
            "release": self._policy,  # a page of another one loads itself again
            "num_workers": 1 + len(others),
            "late_workers": [number for number, other in others.items() if other is None],
            "nodes": nodes,
            "balance": await self._word(),
            **summary([self._part(), *reported]),
        }
        return msgspec.json.encode(state)

    def _part(self) -> RecentPart:
        return self._s.recent.part(self._s.metrics.num_in_flight)


class SharedSnapshot:
    """Makes a snapshot if one is asked for and the last one is older than INTERVAL_S. `clock`: monotonic seconds."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._task: asyncio.Future[bytes] | None = None
        self._begun_s = 0.0
        self._num_given = 0

    async def get(self) -> bytes:
        """Raises TooManyWatchers, and what `make` raises."""
        now_s = self._clock()
        if self._task is None or (self._task.done() and now_s >= self._begun_s + INTERVAL_S):
            self._task, self._begun_s, self._num_given = asyncio.ensure_future(self._make()), now_s, 0
        if self._num_given >= MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} pages watch this router already; try again later")
        self._num_given += 1
        return await asyncio.shield(self._task)  # the other watchers wait for it too


def is_local(peer: str, headers: Mapping[str, str]) -> bool:
    """Whether a request comes from this machine, and neither through a proxy nor from a page of another site.

    `peer`: address of the connection. `Host` must be local too, because a site can let its name mean 127.0.0.1.
    """
    host = re.sub(r":\d+$", "", headers.get("host", "")).lower()
    if host not in _LOOPBACK or any(name in headers for name in _OF_OTHERS):
        return False
    try:
        address = ip_address(peer)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def content_policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own style and script by hash, data of its server, nothing else."""

    def hashed(tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
