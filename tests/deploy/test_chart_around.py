"""What is around the pods: labels of all objects, objects of the user's own, and what repeats in rendered YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.chart import objects_of, of_kind, one, pods, render

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMON = {"team": "inference", "example.com/tier": "gold"}
EVERYTHING: dict[str, Any] = {
    "commonLabels": COMMON,
    "pool": {"enabled": True}, "preflight": {"enabled": True}, "model": {"claim": {"create": True}},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}], "gatewaysFrom": [{"namespaceSelector": {}}]},
    "monitoring": {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "prometheusRule", "dashboard")},
    "router": {"inferencePool": {"enabled": True}, "autoscaling": {"enabled": True}, "ingress": {"enabled": True},
               "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
    "nodeDefaults": {"autoscaling": {"enabled": True, "by": "keda", "keda": {"prometheus": "http://p:9090"}}},
}  # fmt: skip


def selectors(value: Any) -> Iterator[dict[str, Any]]:
    """Every selector at any depth: they cannot change, or find what has other labels."""
    if isinstance(value, list):
        for inner in value:
            yield from selectors(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("selector", "matchLabels", "podSelector", "labelSelector"):
                yield inner
            yield from selectors(inner)


def test_common_labels_are_on_every_object_and_pod_and_in_no_selector() -> None:
    objects = render(EVERYTHING)
    assert len({found["kind"] for found in objects}) >= 18
    assert [
        found["metadata"]["name"] for found in objects if not found["metadata"]["labels"].items() >= COMMON.items()
    ] == []
    assert [part.owner for part in pods(objects) if not part.labels.items() >= COMMON.items()] == []
    found = list(selectors(objects))
    assert len(found) >= 30
    assert [selector for selector in found if "team" in str(selector)] == []


@pytest.mark.parametrize(
    ("values", "kind", "name"),
    [
        ({"nodeDefaults": {"podLabels": {"team": "own"}}}, "StatefulSet", "-decode"),
        ({"router": {"podLabels": {"team": "own"}}}, "Deployment", "-router"),
        ({"pool": {"enabled": True, "podLabels": {"team": "own"}}}, "Deployment", "-pool"),
        ({"router": {"service": {"labels": {"team": "own"}}}}, "Service", "-router"),
        ({"monitoring": {"serviceMonitor": {"enabled": True, "labels": {"team": "own"}}}}, "ServiceMonitor", "-router"),
        ({"monitoring": {"dashboard": {"enabled": True, "labels": {"team": "own"}}}}, "ConfigMap", "-dashboard"),
        ({"monitoring": {"prometheusRule": {"enabled": True, "labels": {"team": "own"}}}}, "PrometheusRule", "cluster"),
    ],
)  # fmt: skip
def test_a_label_of_its_own_wins(values: dict[str, Any], kind: str, name: str) -> None:
    found = one(render({"commonLabels": COMMON, **values}), kind, name)
    labels = found["spec"]["template"]["metadata"]["labels"] if kind in ("StatefulSet", "Deployment") else None
    assert (labels or found["metadata"]["labels"])["team"] == "own"
    assert (labels or found["metadata"]["labels"])["example.com/tier"] == "gold"


def test_a_text_is_a_template_and_an_object_stays_as_it_is() -> None:
    text = 'apiVersion: v1\nkind: Secret\nmetadata: {name: {{ include "pd-cluster.fullname" . }}-more}'
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own"}, "data": {"a": "{{ $labels.node }}"}}
    objects = render({"extraObjects": [text, body]})
    assert one(objects, "Secret", "-more")["metadata"]["name"] == "demo-pd-cluster-more"
    assert [found for found in of_kind(objects, "ConfigMap") if found["metadata"]["name"] == "own"] == [body]


def test_a_key_that_is_written_twice_is_found() -> None:
    with pytest.raises(yaml.YAMLError, match="team"):
        objects_of({"a.yaml": "metadata:\n  labels: {team: a, tier: b, team: c}\n"})
