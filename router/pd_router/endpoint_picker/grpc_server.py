"""The gRPC port: `envoy.service.ext_proc.v3.ExternalProcessor`, and gRPC's health check."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pd_http.errors import PdError, StartupError
from pd_router.endpoint_picker.config import PickerConfig
from pd_router.endpoint_picker.gateway_exchange import GatewayExchange, UnfinishedBodies
from pd_router.endpoint_picker.messages import ProcessingRequest, ProcessingResponse
from pd_router.endpoint_picker.picks import EndpointPicker
from pd_router.node_table import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pd_router.services import Services

log = logging.getLogger("pd_router")
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
# HealthCheckResponse{status: 1 or 2}; the request's only field is the service's name
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
LIVENESS = b"liveness"  # of the process; every other service needs a node that can decode


class PickerServer:
    """The gRPC server of an endpoint picker. It serves as long as its `async with` block.

    Leaving the block refuses new requests, and gives those under way `drain_s` seconds.
    """

    def __init__(self, services: Services) -> None:
        assert isinstance(services.config, PickerConfig)
        self._s = services
        self._config = config = services.config
        self._picker = EndpointPicker(services, config.fallbacks)
        self._unfinished = UnfinishedBodies(int(config.max_unfinished_mb * 1e6))
        self._server: Any = None
        self.port = 0  # while it serves

    async def __aenter__(self) -> PickerServer:
        """Raises StartupError."""
        config = self._config
        self._server = server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])  # else a taken port is shared
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
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
        return self

    def _open(self, address: str) -> int:
        """Raises OSError, RuntimeError."""
        config = self._config
        if not config.grpc_tls_cert:
            return int(self._server.add_insecure_port(address))
        pair = (Path(config.grpc_tls_key).read_bytes(), Path(config.grpc_tls_cert).read_bytes())
        return int(self._server.add_secure_port(address, grpc.ssl_server_credentials((pair,))))

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(self._config.drain_s)

    async def _process(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One HTTP request, from its headers to the end of the gateway's stream."""
        exchange = GatewayExchange(self._s, self._picker, self._unfinished)
        try:
            async for message in messages:
                try:
                    await self._s.turns.take(exchange.num_to_read(message))
                except PdError as error:
                    yield exchange.refused(error)
                    return
                for answer in exchange.take(message):
                    yield answer
                if exchange.is_refused:
                    return
        finally:
            exchange.close()

    async def _check(self, request: bytes, context: Any) -> bytes:
        if LIVENESS in request or self._s.table.healthy((Role.DECODE, Role.MIXED), None):
            return SERVING
        return NOT_SERVING
