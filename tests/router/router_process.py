"""The real router on a real port, inside the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import aiohttp
import uvicorn

from pd_connectors.protocol.ticket import NodeOrder, sign
from pd_http.sockets import bound
from pd_router.app import create_app
from pd_router.cli import FILES_PER_REQUEST
from pd_router.config import RouterConfig
from pd_router.edge.client_connection import token_path
from pd_router.sources.make import make_sources
from pd_router.watch.health import HealthPoller
from tests.deadlines import HANG_S
from tests.in_loop_server import in_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from pd_router.requests.services import Services
    from pd_router.sources.base import NodeSource

KEY = b"k" * 32
NUM_FILES = 4096
SPIN_S, REST_S = 0.02, 0.001  # of `until`


def signed(
    action: Literal[
        "add", "remove", "drain", "resume", "role", "reset_cache", "start_profile", "stop_profile", "balance"
    ],
    node: str,
    role: str = "",
    *,
    key: bytes = KEY,
    lives_s: float = 30.0,
    is_forced: bool = False,
    **fields: Any,
) -> dict[str, str]:
    """The header of an order."""
    order = NodeOrder(
        action=action, node=node, role=role, expires_at_s=time.time() + lives_s, is_forced=is_forced, **fields
    )
    return {"x-pd-order": sign(key, order)}


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until `condition` holds; fails after HANG_S.

    What takes longer than SPIN_S waits for a clock or a socket: then the loop may rest, and the processor is free.
    """
    spins_until_s = time.monotonic() + SPIN_S
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0 if time.monotonic() < spins_until_s else REST_S)


class HasUrl(Protocol):
    """A node: a fake one, or a real one."""

    @property
    def url(self) -> str: ...


class Router:
    """Its address, its parts, and a client session towards it."""

    def __init__(self, url: str, services: Services, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.services = services
        self.session = session

    def count(self, name: str, **labels: str) -> float:
        """A sample of the router's metrics; 0 when nothing was counted."""
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0

    async def idle(self) -> None:
        """Until what requests left behind is done; then no charge may be left."""
        await until(lambda: not len(self.services.background))
        assert set(self.outstanding()) == {(0, 0)}

    async def poll(self, *nodes: HasUrl, limit_s: float = HANG_S) -> None:
        """Have /health of these nodes checked once, or of all. `limit_s`: short for nodes that shall not answer."""
        services, urls = self.services, {node.url for node in nodes}
        poller = HealthPoller(replace(services.config, health_timeout_s=limit_s), services.table, services.upstream)
        await asyncio.gather(*(poller.poll(n) for n in services.table.nodes if not urls or n.url in urls))

    def outstanding(self) -> list[tuple[int, int]]:
        return [(n.prefill_bytes, n.decode_sequences) for n in self.services.table.nodes]


@contextlib.asynccontextmanager
async def serving(
    prefill: Sequence[HasUrl] | None = None,
    decode: Sequence[HasUrl] | None = None,
    mixed: Sequence[HasUrl] | None = None,
    sources: list[NodeSource] | None = None,
    key: bytes = KEY,
    num_files: int = NUM_FILES,
    clock: Callable[[], float] = time.monotonic,
    **settings: object,
) -> AsyncIterator[Router]:
    """Starts the router over nodes that run already. Health is polled once, then only when a test asks; no order is
    changed for a queue, unless it is asked for.

    `sources`: instead of those that the settings ask for. `clock`: of the bounds of connections.
    """
    config = RouterConfig(
        prefill=tuple(n.url for n in prefill or []),
        decode=tuple(n.url for n in decode or []),
        mixed=tuple(n.url for n in mixed or []),
        **{"health_interval_s": 3600.0, "connect_timeout_s": HANG_S, "prefill_on_decode": "never", **settings},  # type: ignore[arg-type]
    )
    app = create_app(config, key, make_sources(config) if sources is None else sources)
    listener = bound("127.0.0.1", 0)
    gate = app.state.services.metrics.http.make_gate(config, num_files, FILES_PER_REQUEST)
    gate.clock = clock
    path, context = token_path(app.state.proxy), config.server_context()
    protocol = gate.protocol_of(path) if context is None else gate.handshake_of(path, context)
    url = f"{config.scheme}://127.0.0.1:{listener.getsockname()[1]}"
    served = uvicorn.Config(app, http=protocol, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    async with in_loop(served, listener), aiohttp.ClientSession() as session:
        yield Router(url, app.state.services, session)
