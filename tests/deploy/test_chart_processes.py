"""Values that become flags of routers and nodes: TLS between them, targets, logs and traces of requests."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from pd_cluster.launch.cli import build_parser
from pd_http.settings import given_values
from pd_router.config import RouterConfig
from tests.deploy import invariants
from tests.deploy.chart import CHART, Object, one, pods, render

NODE_TLS = "/etc/pd-node-tls"
TLS = {"nodeTls": {"secret": "nodes-tls"}, "roles": {"host": {"kind": "pair"}}}


def args_of(objects: list[Object], role: str) -> list[str]:
    args: list[str] = one(objects, "StatefulSet", f"-{role}")["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


@pytest.mark.parametrize("ca", ["ca.crt", ""])
def test_nodes_with_tls_are_called_and_verified_by_one_name(ca: str) -> None:
    values = TLS | {"nodeTls": {"secret": "nodes-tls", "ca": ca}, "monitoring": {"podMonitor": {"enabled": True}}}
    objects = render(values | {"networkPolicy": {"enabled": False}})
    verified = {"--tls-name=demo-pd-cluster-nodes"} | ({f"--tls-ca=/etc/pd-node-tls/{ca}"} if ca else set())
    for role, num_nodes in (("prefill", 1), ("decode", 1), ("host", 2)):
        template = one(objects, "StatefulSet", f"-{role}")["spec"]["template"]
        assert template["metadata"]["labels"]["pd-cluster/scheme"] == "https"
        assert len(template["spec"]["containers"]) == num_nodes
        for container in template["spec"]["containers"]:
            flags = {argument for argument in container["args"] if argument.startswith("--tls-")}
            own = {f"--tls-cert={NODE_TLS}/tls.crt", f"--tls-key={NODE_TLS}/tls.key"}
            assert flags == verified | own
            assert {container[name]["httpGet"]["scheme"] for name in container if name.endswith("Probe")} == {"HTTPS"}
    router = one(objects, "Deployment", "-router")["spec"]["template"]["spec"]
    flags = {argument for argument in router["containers"][0]["args"] if argument.startswith("--tls-")}
    assert flags == verified
    given = [volume["secret"]["items"] for volume in router["volumes"] if volume["name"] == "node-tls"]
    assert given == ([[{"key": ca, "path": ca}]] if ca else []), "the router has no use for the nodes' private key"
    endpoints = one(objects, "PodMonitor", "-nodes")["spec"]["podMetricsEndpoints"]
    assert {endpoint["scheme"] for endpoint in endpoints} == {"https"}
    assert invariants.volumes(objects, frozenset({"Secret/nodes-tls"})) == []
    parser = build_parser()
    for part in pods(objects):
        for container in part.containers:
            if "command" not in container:
                parser.parse_args(container["args"])
    for found in objects:
        if "monitoring" not in found["apiVersion"]:
            kubernetes_validate.validate(found, "1.32", strict=True)
    named = render(values | {"nodeTls": {"secret": "a", "name": "nodes.example"}, "networkPolicy": {"enabled": False}})
    assert "--tls-name=nodes.example" in args_of(named, "decode")


def test_without_tls_nothing_speaks_of_it() -> None:
    for part in pods(render()):
        assert "pd-cluster/scheme" not in part.labels
        assert not any("tls" in argument for container in part.containers for argument in container.get("args", ()))
        assert not any("tls" in volume["name"] for volume in part.spec["volumes"])


def test_what_a_router_tells_of_requests() -> None:
    router = {
        "requestLog": {"level": "all", "slowTtftMs": 800.5}, "tracing": {"otlpUrl": "http://otel:4318", "ratio": 0.5},
        "apiKeys": {"secret": "k", "maxQueue": 9, "maxQueueMB": 2.5},
        "args": {"allowed-origins": ["https://a.example", "https://b.example"]},
    }  # fmt: skip
    objects = render({"router": router, "slo": {"ttftMs": 400, "itlMs": 90}})
    [container] = one(objects, "Deployment", "-router")["spec"]["template"]["spec"]["containers"]
    config = RouterConfig(**given_values(vars(build_parser().parse_args(container["args"])), RouterConfig, {}))
    assert (config.request_log, config.slow_ttft_ms) == ("all", 800.5)
    assert (config.otlp_url, config.trace_ratio) == ("http://otel:4318", 0.5)
    assert (config.max_queue, config.max_queue_mb) == (9, 2.5)
    assert config.allowed_origins == ("https://a.example", "https://b.example")
    assert (config.slo_ttft_ms, config.slo_tpot_ms) == (400.0, 0.0)
    targets = [argument for argument in args_of(objects, "decode") if argument.startswith("--slo-")]
    assert sorted(targets) == ["--slo-itl-ms=90", "--slo-ttft-ms=400"]


def test_defaults_of_the_chart_are_those_of_the_router() -> None:
    """A value that the chart writes without being asked changes nothing."""
    [container] = one(render(), "Deployment", "-router")["spec"]["template"]["spec"]["containers"]
    config = RouterConfig(**given_values(vars(build_parser().parse_args(container["args"])), RouterConfig, {}))
    usual = RouterConfig(start_empty=True)
    for name in ("request_log", "slow_ttft_ms", "otlp_url", "trace_ratio", "slo_ttft_ms", "max_queue", "max_queue_mb"):
        assert getattr(config, name) == getattr(usual, name), name
    values = yaml.safe_load((CHART / "values.yaml").read_text())["router"]
    assert (values["tracing"]["ratio"], values["apiKeys"]["maxQueue"], values["apiKeys"]["maxQueueMB"]) == (
        usual.trace_ratio, usual.max_queue, usual.max_queue_mb,
    )  # fmt: skip
