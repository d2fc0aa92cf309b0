"""The gRPC port: `envoy.service.ext_proc.v3.ExternalProcessor`, and gRPC's health check."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from pd_http.errors import PdError, StartupError
from pd_http.leaving import POLL_S, QUIET_S
from pd_router.endpoint_picker.config import PickerConfig
from pd_router.endpoint_picker.gateway_exchange import GatewayExchange, UnfinishedBodies
from pd_router.endpoint_picker.messages import ProcessingRequest, ProcessingResponse
from pd_router.endpoint_picker.picks import EndpointPicker
from pd_router.nodes.node import DECODERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pd_router.requests.services import Services

log = logging.getLogger("pd_router")
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
# HealthCheckResponse{status: 1 or 2}; the request's only field is the service's name
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
KEEPALIVE_MS = 30_000  # a gateway that is gone without a word leaves no streams, which hold places at nodes
LIVENESS = b"liveness"  # of the process; every other service needs a node that can decode


class PickerServer:
    """The gRPC server of an endpoint picker. It serves as long as its `async with` block.

    When the process leaves, the health check says NOT_SERVING. Requests are served until none comes for QUIET_S, or
    `linger_s` is over: a gateway's connections stay open until it learns of other pickers, and gRPC refuses what comes
    on them once it stops. Then those under way have the rest of `drain_s`. All of that is over when the block is left.
    """

    def __init__(self, services: Services) -> None:
        assert isinstance(services.config, PickerConfig)
        self._s = services
        self._config = config = services.config
        self._picker = EndpointPicker(services, config.fallbacks)
        self._unfinished = UnfinishedBodies(int(config.max_unfinished_mb * 1e6))
        self._server: Any = None
        self._stop: asyncio.Future[None]
        self._num_open = 0  # streams
        self._last_s = 0.0  # when a stream began or ended
        self.port = 0  # while it serves

    async def __aenter__(self) -> PickerServer:
        """Raises StartupError."""
        config = self._config
        options = [("grpc.so_reuseport", 0), ("grpc.keepalive_time_ms", KEEPALIVE_MS)]  # else a taken port is shared
        self._server = server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(self._process, None, ProcessingResponse.SerializeToString)
        check = grpc.unary_unary_rpc_method_handler(self._check)  # bytes
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
            )
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port = self._open(f"{host}:{config.grpc_port}")
        except (OSError, RuntimeError) as error:
            raise StartupError(f"cannot serve gRPC on {host}:{config.grpc_port}: {error}") from error
        await server.start()
        log.info("picks endpoints for gateways at %s:%d (gRPC)", host, self.port)
        self._stop = asyncio.ensure_future(self._leave())
        return self

    def _open(self, address: str) -> int:
        """Raises OSError, RuntimeError."""
        config = self._config
        if not config.grpc_tls_cert:
            return int(self._server.add_insecure_port(address))
        pair = (Path(config.grpc_tls_key).read_bytes(), Path(config.grpc_tls_cert).read_bytes())
        return int(self._server.add_secure_port(address, grpc.ssl_server_credentials((pair,))))

    async def __aexit__(self, *exc_info: object) -> None:
        self._s.leaving.set()
        await self._stop

    async def _leave(self) -> None:
        await self._s.leaving.wait()
        begun_s, drain_s = time.monotonic(), self._config.drain_s
        while (now_s := time.monotonic()) < begun_s + min(self._config.linger_s, drain_s):
            if not self._num_open and now_s >= self._last_s + QUIET_S:
                break
            await asyncio.sleep(POLL_S)
        await self._server.stop(max(0.0, begun_s + drain_s - now_s))

    async def _process(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One HTTP request, from its headers to the end of the gateway's stream."""
        exchange, messages = GatewayExchange(self._s, self._picker, self._unfinished), aiter(messages)
        self._num_open, self._last_s = self._num_open + 1, time.monotonic()
        try:
            while not exchange.is_refused:
                message = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(exchange.left_s):
                        if (data := await anext(messages, None)) is None:
                            return
                        message = ProcessingRequest.FromString(data)
                try:
                    await self._s.turns.take(0 if message is None else exchange.num_to_read(message))
                except PdError as error:
                    yield exchange.refused(error)
                    return
                for answer in exchange.take(message):
                    yield answer
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a ProcessingRequest, or nested too deeply")
        finally:
            self._num_open, self._last_s = self._num_open - 1, time.monotonic()
            exchange.close()

    async def _check(self, request: bytes, context: Any) -> bytes:
        can_serve = self._s.table.healthy(DECODERS, None) and not self._s.leaving.is_set()
        return SERVING if can_serve or LIVENESS in request else NOT_SERVING
