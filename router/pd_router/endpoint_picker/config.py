"""The settings of `pd-cluster epp`: those of a router, and its gRPC port."""

from __future__ import annotations

from dataclasses import dataclass

from pd_http.errors import StartupError
from pd_http.settings import MAX_PORT, setting
from pd_router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerConfig(RouterConfig):
    """The process is a router with one more port: orders, metrics and direct calls go to its HTTP port."""

    port: int = setting(
        9090, "HTTP port: a router's, with /metrics and /nodes. 0: chosen by the OS and printed.", most=MAX_PORT
    )
    grpc_port: int = setting(9002, "gRPC port for gateways (ext_proc). 0: chosen by the OS and logged.", most=MAX_PORT)
    grpc_tls_cert: str = setting("", "Certificate chain (PEM) of the gRPC port. Default: no TLS there.")
    grpc_tls_key: str = setting("", "Private key (PEM) of that certificate.")
    fallbacks: int = setting(2, "Decode nodes named after the first one, for the gateway's own retries.", most=16)

    def __post_init__(self) -> None:
        RouterConfig.__post_init__(self)
        if self.workers != 1:
            raise StartupError("--workers: an endpoint picker is one process; start several of them instead")
        if bool(self.grpc_tls_cert) != bool(self.grpc_tls_key):
            raise StartupError("--grpc-tls-cert and --grpc-tls-key go together")
