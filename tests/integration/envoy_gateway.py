"""A real Envoy before decode nodes, with an endpoint picker: configured as gateways with InferencePool do it."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from tests.integration.system import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.cluster import Launched, Launcher

ENVOY = os.environ.get("ENVOY") or shutil.which("envoy")
_TYPE = "type.googleapis.com/envoy.extensions"
DESTINATION = "x-gateway-destination-endpoint"


def start_envoy(launcher: Launcher, folder: Path, picker_port: int, nodes: Sequence[str]) -> tuple[Launched, str]:
    """`nodes`: URLs of the pool's endpoints. The process, and the gateway's URL."""
    assert ENVOY is not None
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_text(json.dumps(_config(picker_port, nodes)))
    command = [ENVOY, "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning",
               "--admin-address-path", str(admin)]  # fmt: skip
    envoy = launcher.start("envoy", command)
    wait_until(lambda: admin.exists() and bool(admin.read_text()), lambda: envoy.output)
    listeners = httpx.get(f"http://{admin.read_text()}/listeners", trust_env=False).text
    found = re.search(r"127\.0\.0\.1:\d+", listeners)
    assert found, listeners
    url = f"http://{found.group()}"
    wait_until(lambda: _serves(url), lambda: envoy.output)
    return envoy, url


def _serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _config(picker_port: int, nodes: Sequence[str]) -> dict[str, Any]:
    retries = {"retry_on": "connect-failure,reset-before-request", "num_retries": 2}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s", "retry_policy": retries}}]
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "stream_idle_timeout": "0s",
        "request_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [_picker(), {
            "name": "router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}}],
    }  # fmt: skip
    filters = [{"name": "http", "typed_config": manager}]
    listener = {"name": "clients", "address": _address(0), "filter_chains": [{"filters": filters}]}
    return {
        "admin": {"address": _address(0)},
        "static_resources": {"listeners": [listener], "clusters": [_pool(nodes), _picker_cluster(picker_port)]},
    }


def _picker() -> dict[str, Any]:
    modes = {"header_mode": "SEND", "trailer_mode": "SEND", "body_mode": "FULL_DUPLEX_STREAMED"}
    return {
        "name": "picker",
        "typed_config": {
            "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
            "processing_mode": {f"{side}_{name}": mode for side in ("request", "response")
                                for name, mode in modes.items()},
            "message_timeout": "10s",
            "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        },
    }  # fmt: skip


def _pool(nodes: Sequence[str]) -> dict[str, Any]:
    robin = {"name": "robin", "typed_config": {"@type": f"{_TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"}}
    override = {
        "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}, {"header": DESTINATION}
        ],
        "fallback_policy": {"policies": [{"typed_extension_config": robin}]},
    }  # fmt: skip
    ports = [urlsplit(url).port for url in nodes]
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "3s",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]
        },
        "load_assignment": _assignment("pool", ports),
    }


def _picker_cluster(port: int) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "3s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": _assignment("picker", [port]),
    }


def _assignment(name: str, ports: Sequence[int | None]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port or 0)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
