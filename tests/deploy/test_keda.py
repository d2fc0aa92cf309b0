"""KEDA's triggers of a prefill role that may have no pod: what they ask of Prometheus, and what it answers."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deadlines import HANG_S
from tests.deploy import metric_names
from tests.deploy.chart import one, render

if TYPE_CHECKING:
    from pathlib import Path

PROMTOOL = shutil.which("promtool")
SERVER: dict[str, Any] = {"prometheus": "http://prometheus:9090", "promptTokensPerSecond": 1000, "queuedTokens": 16384}
CRON = {"type": "cron", "metadata": {"timezone": "UTC", "start": "0 8 * * *", "end": "0 9 * * *"}}


def scaled(gateway: bool = False, **keda: Any) -> dict[str, Any]:
    """The spec of the prefill role's ScaledObject, from no pod on. `gateway`: requests pass the routers by."""
    autoscaling = {"enabled": True, "by": "keda", "minReplicas": 0, "keda": keda}
    values = {"roles": {"prefill": {"autoscaling": autoscaling}}, "networkPolicy": {"enabled": False}}
    objects = render(values | {"router": {"inferencePool": {"enabled": gateway}}})
    spec: dict[str, Any] = one(objects, "ScaledObject", "-prefill")["spec"]
    return spec


@pytest.mark.parametrize("gateway", [False, True])
def test_from_zero_it_is_woken_by_what_other_pods_tell(gateway: bool) -> None:
    spec = scaled(gateway, **SERVER, cooldownPeriod=900)
    assert (spec["minReplicaCount"], spec["cooldownPeriod"]) == (0, 900)
    queued, rate = (trigger["metadata"] for trigger in spec["triggers"])
    assert 'node=~"demo-pd-cluster-.+"' in queued["query"]
    assert queued["threshold"] == queued["activationThreshold"] == "16384"
    assert rate["threshold"] == "1", "a second pod is not asked for"
    assert queued["ignoreNullValues"] == rate["ignoreNullValues"] == "false"
    read = {name for one in (queued, rate) for name in metric_names.names_in(one["query"])}
    assert len(read) == 4
    assert read <= metric_names.exported()


def test_own_triggers_stand_beside_ours_or_alone() -> None:
    assert [trigger["type"] for trigger in scaled(**SERVER, triggers=[CRON])["triggers"]] == [
        "prometheus", "prometheus", "cron",
    ]  # fmt: skip
    assert scaled(triggers=[CRON])["triggers"] == [CRON]


ROUTER = 'namespace="llm",pod="demo-pd-cluster-router-0"'
NODE = 'namespace="llm",pod="demo-pd-cluster-decode-0"'
PREFILL = 'namespace="llm",pod="demo-pd-cluster-prefill-0",work="prefill"'
SERIES = {
    "up": f"pd_router_requests_in_flight{{{ROUTER}}}",
    "prompt": f'pd_router_prompt_tokens_total{{{ROUTER},model="m"}}',
    "cached": f'pd_router_cached_tokens_total{{{ROUTER},model="m"}}',
    "other": 'pd_router_prompt_tokens_total{namespace="llm",pod="other-router-0",model="m"}',
    "d0": f'pd_router_node_queued_tokens{{{ROUTER},node="demo-pd-cluster-decode-0",role="decode"}}',
    "p0": f'pd_router_node_queued_tokens{{{ROUTER},node="demo-pd-cluster-prefill-0",role="prefill"}}',
    "node": f"pd_num_waiting{{{NODE}}}",
    "taken": f'pd_prompt_tokens_total{{{NODE},work="take_over"}}',
    "alone": f'pd_prompt_tokens_total{{{NODE},work="generate"}}',
    "at node": f'pd_cached_tokens_total{{{NODE},work="generate"}}',
    "prefilled": f"pd_prompt_tokens_total{{{PREFILL}}}",
}
STEADY = {"up": "0x10", "cached": "0x10", "d0": "0x10"}  # routers that are scraped, and nodes without a queue
NODES = {"up": "0x10", "node": "0x10", "d0": "0x10", "at node": "0x10"}


@pytest.mark.parametrize(
    ("series", "values"),
    [
        pytest.param({}, [None, None], id="routers are not scraped"),
        pytest.param({"up": "0x10", "d0": "0x10"}, [0, 0], id="no answer yet"),
        pytest.param(STEADY | {"prompt": "0+120000x10"}, [0, 1], id="decode nodes read 2000 tokens a second"),
        pytest.param(STEADY | {"prompt": "0+120000x10", "cached": "0+90000x10"}, [0, 0], id="caches have most"),
        pytest.param(STEADY | {"prompt": "0+6000x10", "d0": "20000x10"}, [20000, 0], id="all is stuck, no answers"),
        pytest.param({"up": "0x10", "d0": "0x10", "other": "0+120000x10"}, [0, 0], id="another release's routers"),
        pytest.param(STEADY | {"prompt": "0+6000x10", "d0": "5x10", "p0": "30000x10"}, [30005, 0], id="a prefill node"),
    ],
)
def test_prometheus_answers_what_wakes_prefill(
    series: dict[str, str], values: list[int | None], tmp_path: Path
) -> None:
    ask(scaled(**SERVER), series, values, tmp_path)


@pytest.mark.parametrize(
    ("series", "values"),
    [
        pytest.param({"up": "0x10", "d0": "0x10"}, [0, None], id="nodes are not scraped"),
        pytest.param(NODES | {"alone": "0+120000x10"}, [0, 1], id="decode nodes read"),
        pytest.param(
            NODES | {"taken": "0+120000x10", "prefilled": "0+120000x10"}, [0, 1], id="prompts are handed over"
        ),
        pytest.param(NODES | {"taken": "0+40000x10", "prefilled": "0+40000x10"}, [0, 0], id="each counts once"),
    ],
)
def test_behind_a_gateway_the_nodes_tell(series: dict[str, str], values: list[int | None], tmp_path: Path) -> None:
    ask(scaled(True, **SERVER), series, values, tmp_path)


def ask(spec: dict[str, Any], series: dict[str, str], values: list[int | None], folder: Path) -> None:
    """Assert that the triggers' queries give these values after 10 minutes of samples, one a minute. None: no sample,
    which is an error to KEDA."""
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    asked = [
        {
            "expr": trigger["metadata"]["query"],
            "eval_time": "10m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for trigger, value in zip(spec["triggers"], values, strict=True)
    ]
    given = [{"series": SERIES[name], "values": text} for name, text in series.items()]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": asked}
    cases = folder / "keda.test.yaml"
    cases.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(cases)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
