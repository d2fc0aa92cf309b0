"""Every metric name that the code can export, and every one that alerts and dashboard read."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import yaml

from pd_cluster.config import LoraConfig
from pd_cluster.protocol.messages import EngineStats, KvStats
from pd_cluster.server.node.adapter_metrics import AdapterCollector
from pd_cluster.server.node.metrics import NodeMetrics
from pd_cluster.server.node.node_adapters import NodeAdapters
from pd_router.config import RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.records.metrics import RouterMetrics
from tests.deploy.chart import CHART, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from pd_cluster.engine.client import EngineClient

ALERTS = CHART / "files" / "alerts.yaml"
DASHBOARD = CHART / "files" / "dashboard.json"
_NAME = re.compile(r"\bpd_[a-z0-9_]+")
_KEY = re.compile(r"[a-z][a-z0-9_]+(\|[a-z_]+=.*)?")


def exported() -> set[str]:
    """Names of samples, with the suffixes that histograms and counters get."""
    router = RouterMetrics(NodeTable(RouterConfig(decode=("http://localhost:1",)), lambda: 0.0))
    node = NodeMetrics()
    counters = dict.fromkeys(_engine_counters(), 0.0)
    gauges = dict.fromkeys(_engine_gauges(), 0.0)
    kv = KvStats(num_blocks=1, free=1, cached=0, in_use=0, leased=0, quarantined=0)
    stats = EngineStats(
        kv=kv, num_running=0, num_waiting=0, num_waiting_for_remote_kv=0, counters=counters, gauges=gauges
    )
    node.add_engine(lambda: stats, lambda: {"role": "mixed"})
    adapters = NodeAdapters(LoraConfig(), cast("EngineClient", SimpleNamespace(stats=stats)), ())
    node.registry.register(AdapterCollector(adapters))
    return {name for registry in (router.registry, node.registry) for name in _samples(registry)}


def _samples(registry: CollectorRegistry) -> Iterator[str]:
    for family in registry.collect():
        match family.type:
            case "counter":
                yield f"{family.name}_total"
            case "histogram":
                yield from (f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
            case _:
                yield family.name


def _engine_counters() -> set[str]:
    """Keys ending in _total, wherever the engine and the connectors write one: no single object holds them all."""
    return {key for key in _strings() if key.partition("|")[0].endswith("_total")}


def _engine_gauges() -> set[str]:
    """The other keys of methods `stats` and `gauges`, and of the step loop's gauges."""
    return {key for key in _strings() if not key.partition("|")[0].endswith("_total")}


@cache
def _strings() -> frozenset[str]:
    return frozenset(_written())


def _written() -> Iterator[str]:
    for folder in (
        ROOT / "pd_cluster" / "scheduling",
        ROOT / "pd_cluster" / "engine",
        ROOT / "connectors" / "pd_connectors",
    ):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name in ("stats", "_stats", "counters", "gauges"):
                    yield from _keys(node)
                elif isinstance(node, ast.Constant) and str(node.value).endswith("_total"):
                    yield str(node.value)


def _keys(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        for key in node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []:
            text = _literal(key)
            if _KEY.fullmatch(text):
                yield text


def _literal(key: ast.expr | None) -> str:
    if isinstance(key, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in key.values)
    return str(key.value) if isinstance(key, ast.Constant) else ""


def alert_expressions() -> dict[str, str]:
    """Alert -> its expression."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def dashboard_expressions() -> dict[str, str]:
    """Panel and letter -> its expression."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }


def names_in(expression: str) -> set[str]:
    return set(_NAME.findall(expression))
