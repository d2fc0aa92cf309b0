"""Alerts and dashboard read metrics that exist; promtool, where it is installed, accepts and tests the alerts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deadlines import HANG_S
from tests.deploy import metric_names
from tests.deploy.chart import ROOT, one, render

KEDA = {"prometheus": "http://prometheus:9090"}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    return metric_names.exported()


@pytest.mark.parametrize("expressions", [metric_names.alert_expressions(), metric_names.dashboard_expressions()],
                         ids=["alerts", "dashboard"])  # fmt: skip
def test_every_metric_that_is_read_is_exported(expressions: dict[str, str], exported: set[str]) -> None:
    assert len(expressions) >= 12
    unknown = {where: names for where, text in expressions.items() if (names := metric_names.names_in(text) - exported)}
    assert unknown == {}


def test_a_metric_that_no_process_exports_is_found(exported: set[str]) -> None:
    assert metric_names.names_in("rate(pd_router_requests[5m]) / pd_num_waitin") - exported == {
        "pd_router_requests", "pd_num_waitin",
    }  # fmt: skip


def test_known_names_come_from_every_source(exported: set[str]) -> None:
    assert {
        "pd_router_node_healthy", "pd_router_requests_total", "pd_time_to_first_token_seconds_bucket",
        "pd_transfer_seconds_count", "pd_kv_blocks", "pd_num_waiting", "pd_preemptions_swap_total",
        "pd_prefills_remote_total", "pd_first_token_redraws_total",
        "pd_loads_failed_total", "pd_leases_open", "pd_bad_frames_total", "pd_node_info",
    } <= exported  # fmt: skip


def test_autoscalers_ask_for_metrics_that_are_exported(exported: set[str]) -> None:
    on = {"enabled": True}
    objects = render({"nodeDefaults": {"autoscaling": on}})
    scaler = one(objects, "HorizontalPodAutoscaler", "prefill")
    assert {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} <= exported
    scaled = render({"roles": {"own": {"kind": "mixed", "autoscaling": on | {"by": "keda", "keda": KEDA}}}})
    for trigger in one(scaled, "ScaledObject", "own")["spec"]["triggers"]:
        assert metric_names.names_in(trigger["metadata"]["query"]) <= exported


def test_dashboard_has_unique_panels_inside_the_grid() -> None:
    panels = json.loads(metric_names.DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    rows = {y for _, y in taken}
    assert len(taken) == 24 * len(rows), "a row with a gap"


def test_chart_carries_alerts_and_dashboard_as_they_are() -> None:
    on = {"enabled": True}
    objects = render({"monitoring": {"prometheusRule": on, "dashboard": on}})
    rule, board = one(objects, "PrometheusRule", "cluster"), one(objects, "ConfigMap", "dashboard")
    assert rule["spec"]["groups"] == yaml.safe_load(metric_names.ALERTS.read_text())["groups"]
    assert json.loads(board["data"]["pd-cluster.json"]) == json.loads(metric_names.DASHBOARD.read_text())


@needs_promtool
def test_promtool_accepts_the_alerts() -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(metric_names.ALERTS)], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert PROMTOOL is not None
    cases = Path(__file__).parent / "alerts.test.yaml"
    done = subprocess.run([PROMTOOL, "test", "rules", str(cases)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_understands_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """Each becomes a recording rule, with Grafana's variables filled in."""
    assert PROMTOOL is not None
    expressions = metric_names.dashboard_expressions().values()
    rules = [
        {"record": f"panel:{i}", "expr": text.replace("$__rate_interval", "1m").replace("$namespace", ".*")}
        for i, text in enumerate(expressions)
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@needs_promtool
def test_promtool_accepts_compose_s_prometheus(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("/etc/prometheus/alerts.yaml", str(metric_names.ALERTS)))
    done = subprocess.run([PROMTOOL, "check", "config", str(config)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
