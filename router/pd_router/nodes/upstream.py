"""HTTP requests to the nodes: one connection pool, every wait has a name, every failure is a `LegFailed`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pd_connectors.protocol.clock import patiently
from pd_http.errors import ABSENT_CODES, ENGINE_DIED, FINAL_CODES
from pd_http.node_answers import FailureKind, code_of, has_lost_requests, object_in
from pd_http.refusal import Refusal
from pd_router.nodes.connection_pool import ConnectionPool, NoConnection
from pd_router.nodes.node_connection import AnswerUnreadable, Unanswered

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from pd_router.config import RouterConfig
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_connection import NodeExchange


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
        return self.answer is not None and code_of(self.answer.body) in FINAL_CODES


_NO_PLACE = frozenset(one.word for one in Refusal if one.status == 503)  # by the bounds of a node's connections
# What a connection and `asyncio.timeout` raise while a leg waits.
LEG_ERRORS = (TimeoutError, OSError)


def leg_failure(node: Node, error: Exception, wait: str, timeout: str) -> LegFailed:
    """The LegFailed for `error`, one of LEG_ERRORS. `wait`, `timeout`: name and message if a deadline passed."""
    if isinstance(error, NoConnection):
        return LegFailed(node, FailureKind.OWN if error.is_own else FailureKind.CONNECT, str(error))
    if isinstance(error, TimeoutError):
        return LegFailed(node, FailureKind.TIMEOUT, timeout, wait=wait)
    kind = FailureKind.BAD_ANSWER if isinstance(error, AnswerUnreadable) else FailureKind.BROKEN
    return LegFailed(node, kind, f"{type(error).__name__}: {error}")


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
        self._make_tls = config.client_context
        self._connections: ConnectionPool | None = None

    async def __aenter__(self) -> Upstream:
        self._connections = ConnectionPool(self._connect_timeout_s, self._keepalive_s, self._make_tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connections is not None:
            self._connections.close()
            self._connections = None

    @property
    def connections(self) -> ConnectionPool:
        assert self._connections is not None, "used outside `async with`"
        return self._connections

    async def exchange(
        self, node: Node, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> NodeExchange:
        """A request that has been sent; the caller closes it. Raises what LEG_ERRORS names."""
        return await self.connections.send(node.url, method, path, headers.items(), body)

    async def post(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float
    ) -> NodeExchange:
        """The answer, once its head is there; the caller closes it. Raises Refused (4xx), and LegFailed, also for 429,
        5xx and a model that the node does not serve now.

        A connection that ends at once without an answer is tried once more if the node is alive: the node may just have
        closed a kept-alive connection. If the node is not alive, the request may have killed it.
        """
        retry_until = asyncio.get_running_loop().time() + self._connect_timeout_s
        exchange = await self._send(node, path, headers, body, first_byte_s, retry_until)
        assert exchange.answer is not None
        status = exchange.answer.status
        if status < 400:
            return exchange
        exchange.limit(self._body_timeout_s)
        try:
            answer = await whole_answer(exchange)
        except LEG_ERRORS as error:
            wait = "error_body" if isinstance(error, TimeoutError) else ""
            raise LegFailed(node, FailureKind.BROKEN, f"status {status} without its body", wait=wait) from error
        finally:
            exchange.close()
        if status >= 500 and code_of(answer.body) == ENGINE_DIED:
            raise LegFailed(node, FailureKind.DIED, "its engine died", answer)
        if status == 429 or status >= 500 or code_of(answer.body) in ABSENT_CODES:
            raise LegFailed(node, FailureKind.REFUSED, f"status {status}", answer)
        raise Refused(answer)

    async def _send(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float, retry_until: float
    ) -> NodeExchange:
        epoch = node.epoch
        is_fresh = False
        try:
            while True:
                try:
                    return await self._open("POST", node, path, headers, body, first_byte_s, is_fresh=is_fresh)
                except Unanswered as error:
                    if asyncio.get_running_loop().time() >= retry_until:
                        raise
                    if await self.has_died(node, epoch):
                        raise LegFailed(node, FailureKind.DIED, f"{type(error).__name__}: {error}") from error
                    retry_until, is_fresh = 0.0, True
        except LEG_ERRORS as error:
            raise leg_failure(node, error, "answer", f"no answer within {first_byte_s:g} s") from error

    async def _open(
        self,
        method: str,
        node: Node,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        limit_s: float,
        *,
        is_fresh: bool,
    ) -> NodeExchange:
        """An exchange with its head. `limit_s`: from the end of the request, for the whole answer unless it is changed.

        Raises what LEG_ERRORS names, with the exchange closed.
        """
        exchange = await self.connections.send(node.url, method, path, headers.items(), body, is_fresh=is_fresh)
        exchange.limit(limit_s)
        try:
            await exchange.head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def post_whole(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Answer:
        """A whole small answer. Raises LegFailed, also for 429 and 5xx; Refused for 4xx."""
        exchange = await self.post(node, path, headers, body, timeout_s)
        exchange.limit(timeout_s)
        try:
            return await whole_answer(exchange)
        except LEG_ERRORS as error:
            raise leg_failure(node, error, "control", f"no whole answer within {timeout_s:g} s") from error
        finally:
            exchange.close()

    async def has_died(self, node: Node, epoch: int | None, *, is_silence_death: bool = True) -> bool:
        """Whether the process with this boot epoch is gone, other than by order. For a node that broke a connection.

        is_silence_death: count a node that does not answer as dead. A frozen process breaks no connection, but a
        successor that has not started yet may hold its listening socket. An answer without an epoch is no report of
        the process. It is no death where a server has no place for a connection; a proxy that does not reach the
        process answers with a 5xx of its own.
        """
        try:
            answer = await patiently(self.get(node, "/health", {}, None), self._probe_timeout_s)
        except TimeoutError:
            return is_silence_death and not node.liveness.has_left(epoch)
        except LegFailed as failure:  # two connections that were accepted, and closed, are no death
            return failure.kind is FailureKind.CONNECT and not node.liveness.has_left(epoch)
        health = object_in(answer.body)
        is_report = "epoch" in health
        is_gone = (
            health["epoch"] != epoch if is_report else answer.status >= 500 and code_of(answer.body) not in _NO_PLACE
        )
        if epoch is not None and is_gone:
            return not node.liveness.has_left(epoch)
        return has_lost_requests(health)

    async def get(self, node: Node, path: str, headers: Mapping[str, str], timeout_s: float | None) -> Answer:
        """A whole small answer, whatever its status. `timeout_s` None: no limit. Raises LegFailed without one."""
        limit_s = inf if timeout_s is None else timeout_s
        try:
            try:
                exchange = await self._open("GET", node, path, headers, b"", limit_s, is_fresh=False)
            except Unanswered:  # the node may just have closed a kept-alive connection
                exchange = await self._open("GET", node, path, headers, b"", limit_s, is_fresh=True)
            try:
                return await whole_answer(exchange)
            finally:
                exchange.close()
        except LEG_ERRORS as error:
            raise leg_failure(node, error, "control", f"no answer within {timeout_s or 0:g} s") from error


async def whole_answer(exchange: NodeExchange) -> Answer:
    """The answer of an exchange with a head, when all of it has arrived."""
    assert exchange.answer is not None
    return Answer(exchange.answer.status, exchange.answer.headers, await exchange.whole())
