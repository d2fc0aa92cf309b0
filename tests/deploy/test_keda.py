"""KEDA's triggers of a prefill role that may have no pod: what they ask of Prometheus, and what it answers."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy import metric_names
from tests.deploy.chart import one, render

if TYPE_CHECKING:
    from pathlib import Path

PROMTOOL = shutil.which("promtool")
SERVER = {"prometheus": "http://prometheus:9090", "promptTokensPerSecond": 1000, "queuedTokens": 16384}
CRON = {"type": "cron", "metadata": {"timezone": "UTC", "start": "0 8 * * *", "end": "0 9 * * *"}}


def scaled(**keda: Any) -> dict[str, Any]:
    """The spec of the prefill role's ScaledObject, from no pod on."""
    autoscaling = {"enabled": True, "by": "keda", "minReplicas": 0, "keda": keda}
    objects = render({"roles": {"prefill": {"autoscaling": autoscaling}}})
    spec: dict[str, Any] = one(objects, "ScaledObject", "-prefill")["spec"]
    return spec


def test_from_zero_it_is_woken_by_what_other_nodes_tell() -> None:
    spec = scaled(**SERVER, cooldownPeriod=900)
    assert (spec["minReplicaCount"], spec["cooldownPeriod"]) == (0, 900)
    queued, rate = (trigger["metadata"] for trigger in spec["triggers"])
    assert 'node=~"demo-pd-cluster-.+"' in queued["query"]
    assert queued["threshold"] == queued["activationThreshold"] == "16384"
    assert rate["threshold"] == "1", "a second pod is not asked for"
    read = {name for one in (queued, rate) for name in metric_names.names_in(one["query"])}
    assert len(read) == 3
    assert read <= metric_names.exported()


def test_own_triggers_stand_beside_ours_or_alone() -> None:
    assert [trigger["type"] for trigger in scaled(**SERVER, triggers=[CRON])["triggers"]] == [
        "prometheus", "prometheus", "cron",
    ]  # fmt: skip
    assert scaled(triggers=[CRON])["triggers"] == [CRON]


@pytest.mark.parametrize(
    ("series", "values"),
    [
        pytest.param({}, [None, None], id="nothing was ever asked"),
        pytest.param({"prompt": "0+120000x10", "d0": "0x10"}, [0, 1], id="decode nodes read 2000 tokens a second"),
        pytest.param({"prompt": "0+120000x10", "cached": "0+90000x10", "d0": "0x10"}, [0, 0], id="caches have most"),
        pytest.param({"prompt": "0+6000x10", "d0": "20000x10"}, [20000, 0], id="all is stuck and nothing answers"),
        pytest.param({"other": "0+120000x10", "d0": "0x10"}, [0, None], id="another release's routers"),
        pytest.param({"prompt": "0+6000x10", "d0": "5x10", "p0": "30000x10"}, [30005, 0], id="a prefill node is there"),
    ],
)
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_answers_what_wakes_prefill(
    series: dict[str, str], values: list[int | None], tmp_path: Path
) -> None:
    """Values after 10 minutes of samples, one a minute. None: no sample, which the first query's trigger takes as an
    error and the second one's as 0."""
    router = 'namespace="llm",pod="demo-pd-cluster-router-0"'
    names = {
        "prompt": f'pd_router_prompt_tokens_total{{{router},model="m"}}',
        "cached": f'pd_router_cached_tokens_total{{{router},model="m"}}',
        "other": 'pd_router_prompt_tokens_total{namespace="llm",pod="other-router-0",model="m"}',
        "d0": f'pd_router_node_queued_tokens{{{router},node="demo-pd-cluster-decode-0",role="decode"}}',
        "p0": f'pd_router_node_queued_tokens{{{router},node="demo-pd-cluster-prefill-0",role="prefill"}}',
    }
    given = [{"series": names[name], "values": text} for name, text in series.items()]
    if "prompt" in series and "cached" not in series:  # every model has both
        given.append({"series": names["cached"], "values": "0x10"})
    asked = [
        {
            "expr": trigger["metadata"]["query"],
            "eval_time": "10m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for trigger, value in zip(scaled(**SERVER)["triggers"], values, strict=True)
    ]
    cases = tmp_path / "keda.test.yaml"
    test = {"interval": "1m", "input_series": given, "promql_expr_test": asked}
    cases.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(cases)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
