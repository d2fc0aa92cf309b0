"""HTTP towards the nodes: one connection pool, every wait named, every failure a `LegFailed`."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from pd_router.config import RouterConfig
    from pd_router.nodes import Node

# From this size on aiohttp wants a file rather than bytes, so that writing does not hold up the event loop.
_LARGE_BODY_BYTES = 1 << 20


class FailureKind(StrEnum):
    """Why a leg failed. Each is counted under this name."""

    CONNECT = "connect"  # nobody listens, or no route
    BROKEN = "broken"  # the connection ended before the answer did
    TIMEOUT = "timeout"  # one of the named timeouts
    REFUSED = "refused"  # the node answered 429 or 5xx
    BAD_ANSWER = "bad_answer"  # the node answered something that is not our protocol


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of a node."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class LegFailed(Exception):
    """A leg came to nothing. `answer` is what the node said, when it said something."""

    def __init__(self, node: Node, kind: FailureKind, detail: str, answer: Answer | None = None) -> None:
        super().__init__(f"{node.node_id}: {kind.value}: {detail}")
        self.node = node
        self.kind = kind
        self.answer = answer


class Refused(Exception):
    """The node says that the request itself is wrong (4xx): no other node would say otherwise."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class Upstream:
    """Opens legs. Use it inside `async with`: that is how long its connections live."""

    def __init__(self, config: RouterConfig) -> None:
        self._connect_timeout_s = config.connect_timeout_s
        self._keepalive_s = config.keepalive_s
        self._body_timeout_s = config.control_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        # No limits on connections or total time: admission is the nodes' business, and streams are long.
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
        """The answer, from its head on; the caller closes it. Raises LegFailed, also for 429 and 5xx; Refused for 4xx.

        A connection that ends at once, unanswered, is tried once more on the same node: that is how a kept-alive
        connection looks that the node has just closed.
        """
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        response = await self._send(
            node, path, headers, body, first_byte_s, retry_until=sent_at + self._connect_timeout_s
        )
        if response.status < 400:
            return response
        try:
            async with asyncio.timeout(self._body_timeout_s):
                answer = Answer(response.status, tuple(response.raw_headers), await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LegFailed(node, FailureKind.BROKEN, f"status {response.status} without its body") from error
        finally:
            response.close()
        if answer.status == 429 or answer.status >= 500:
            raise LegFailed(node, FailureKind.REFUSED, f"status {answer.status}", answer)
        raise Refused(answer)

    async def _send(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float, retry_until: float
    ) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(first_byte_s):
                while True:
                    data = body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
                    try:
                        return await self.session.post(node.at(path), data=data, headers=headers, allow_redirects=False)
                    except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError):
                        if asyncio.get_running_loop().time() >= retry_until:
                            raise
                        retry_until = 0.0
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise LegFailed(node, FailureKind.CONNECT, str(error)) from error
        except TimeoutError as error:
            raise LegFailed(node, FailureKind.TIMEOUT, f"no answer within {first_byte_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(node, FailureKind.BROKEN, f"{type(error).__name__}: {error}") from error

    async def post_whole(
        self, node: Node, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Answer:
        """A whole small answer. Raises LegFailed, also for 429 and 5xx; Refused for 4xx."""
        response = await self.post(node, path, headers, body, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return Answer(response.status, tuple(response.raw_headers), await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LegFailed(node, FailureKind.BROKEN, f"{type(error).__name__}: {error}") from error
        finally:
            response.close()

    async def get(self, node: Node, path: str, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """A whole small answer, whatever its status. Raises LegFailed when there is none."""
        try:
            async with asyncio.timeout(timeout_s), self.session.get(node.at(path), headers=headers) as response:
                return Answer(response.status, tuple(response.raw_headers), await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise LegFailed(node, FailureKind.CONNECT, str(error)) from error
        except TimeoutError as error:
            raise LegFailed(node, FailureKind.TIMEOUT, f"no answer within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(node, FailureKind.BROKEN, f"{type(error).__name__}: {error}") from error
