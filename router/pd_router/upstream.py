"""HTTP requests to the nodes: one connection pool, every wait has a name, every failure is a `LegFailed`."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from pd_connectors.protocol.clock import patiently
from pd_http.errors import ENGINE_DIED, NodesDied
from pd_http.node_answers import FailureKind, code_of, has_lost_requests, object_in

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from pd_router.config import RouterConfig
    from pd_router.node_table import Node

# Above this size aiohttp wants a file instead of bytes, so that writing does not block the event loop.
_LARGE_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of a node."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class LegFailed(Exception):
    """A leg failed. `answer`: of the node, if there was one. `wait`: the wait that reached its deadline, if any."""

    def __init__(
        self, node: Node, kind: FailureKind, detail: str, answer: Answer | None = None, wait: str = ""
    ) -> None:
        super().__init__(f"{node.node_id}: {kind.value}: {detail}")
        self.node = node
        self.kind = kind
        self.answer = answer
        self.wait = wait

    @property
    def is_final(self) -> bool:
        """Whether the node says that the request must not be tried on any node again."""
        return self.answer is not None and code_of(self.answer.body) == NodesDied.code


# What aiohttp and `asyncio.timeout` raise while a leg waits.
LEG_ERRORS = (TimeoutError, aiohttp.ClientError, OSError)


def leg_failure(node: Node, error: Exception, wait: str, timeout: str) -> LegFailed:
    """The LegFailed for `error`, one of LEG_ERRORS. `wait`, `timeout`: name and message if a deadline passed."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return LegFailed(node, FailureKind.CONNECT, str(error))
    if isinstance(error, TimeoutError):
        return LegFailed(node, FailureKind.TIMEOUT, timeout, wait=wait)
    return LegFailed(node, FailureKind.BROKEN, f"{type(error).__name__}: {error}")


class Refused(Exception):
    """The request itself is wrong, by a node's 4xx: every node would answer the same."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class Upstream:
    """Opens legs. Its connections live as long as its `async with` block."""

    def __init__(self, config: RouterConfig) -> None:
        self._connect_timeout_s = config.connect_timeout_s
        self._keepalive_s = config.keepalive_s
        self._body_timeout_s = config.control_timeout_s
        self._probe_timeout_s = config.probe_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        # No limit on connections or total time: the nodes admit requests, and streams are long.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside `async with`"
        return self._session

    async def post(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float
    ) -> aiohttp.ClientResponse:
        """The answer, once its head is there; the caller closes it. Raises LegFailed (429 and 5xx too), Refused (4xx).

        A connection that ends at once without an answer is tried once more if the node is alive: the node may just have
        closed a kept-alive connection. If the node is not alive, the request may have killed it.
        """
        retry_until = asyncio.get_running_loop().time() + self._connect_timeout_s
        response = await self._send(node, path, headers, body, first_byte_s, retry_until)
        if response.status < 400:
            return response
        try:
            async with asyncio.timeout(self._body_timeout_s):
                answer = Answer(response.status, tuple(response.raw_headers), await response.read())
        except LEG_ERRORS as error:
            wait = "error_body" if isinstance(error, TimeoutError) else ""
            raise LegFailed(
                node, FailureKind.BROKEN, f"status {response.status} without its body", wait=wait
            ) from error
        finally:
            response.close()
        if answer.status >= 500 and code_of(answer.body) == ENGINE_DIED:
            raise LegFailed(node, FailureKind.DIED, "its engine died", answer)
        if answer.status == 429 or answer.status >= 500:
            raise LegFailed(node, FailureKind.REFUSED, f"status {answer.status}", answer)
        raise Refused(answer)

    async def _send(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float, retry_until: float
    ) -> aiohttp.ClientResponse:
        epoch = node.epoch
        try:
            async with asyncio.timeout(first_byte_s):
                while True:
                    data = body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
                    try:
                        return await self.session.post(node.at(path), data=data, headers=headers, allow_redirects=False)
                    except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError) as error:
                        if asyncio.get_running_loop().time() >= retry_until:
                            raise
                        if await self.has_died(node, epoch):
                            raise LegFailed(node, FailureKind.DIED, f"{type(error).__name__}: {error}") from error
                        retry_until = 0.0
        except LEG_ERRORS as error:
            raise leg_failure(node, error, "answer", f"no answer within {first_byte_s:g} s") from error

    async def post_whole(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Answer:
        """A whole small answer. Raises LegFailed, also for 429 and 5xx; Refused for 4xx."""
        response = await self.post(node, path, headers, body, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return Answer(response.status, tuple(response.raw_headers), await response.read())
        except LEG_ERRORS as error:
            raise leg_failure(node, error, "control", f"no whole answer within {timeout_s:g} s") from error
        finally:
            response.close()

    async def has_died(self, node: Node, epoch: int | None, *, is_silence_death: bool = True) -> bool:
        """Whether the process with this boot epoch is gone. For a node that broke a connection.

        is_silence_death: count a node that does not answer as dead. A frozen process breaks no connection, but a
        successor that has not started yet may hold its listening socket.
        """
        try:
            answer = await patiently(self.get(node, "/health", {}, None), self._probe_timeout_s)
        except TimeoutError:
            return is_silence_death
        except LegFailed:
            return True
        health = object_in(answer.body)
        return has_lost_requests(health) or (epoch is not None and health.get("epoch") != epoch)

    async def get(self, node: Node, path: str, headers: Mapping[str, str], timeout_s: float | None) -> Answer:
        """A whole small answer, whatever its status. `timeout_s` None: no limit. Raises LegFailed without one."""
        try:
            async with asyncio.timeout(timeout_s), self.session.get(node.at(path), headers=headers) as response:
                return Answer(response.status, tuple(response.raw_headers), await response.read())
        except LEG_ERRORS as error:
            raise leg_failure(node, error, "control", f"no answer within {timeout_s or 0:g} s") from error
