"""Every example: renders, is valid in three Kubernetes versions, holds together, is what its golden says.

REGENERATE_GOLDENS=1 pytest tests/deploy   writes the goldens anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy import invariants
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    Object,
    example_values,
    load_chart,
    objects_of,
    of_kind,
    parser,
    pods,
    render,
    title,
)
from tests.deploy.custom_resources import check_with_crds
from tests.deploy.validity import VERSIONS, faults, is_custom

GOLDENS = Path(__file__).parent / "goldens"
NEEDS_LATEST = ("pair",)  # a claim of devices by the name of its template
INVARIANTS = (
    invariants.names, invariants.selectors, invariants.ports, invariants.resources, invariants.autoscalers,
    invariants.grace, invariants.probes, invariants.hardening, invariants.router_knows_nodes,
    invariants.nodes_know_pool, invariants.node_network, invariants.inference_pools,
)  # fmt: skip
OUTSIDE = frozenset(  # what users bring
    {"Secret/pd-cluster-key", "PersistentVolumeClaim/weights", "PersistentVolumeClaim/adapters"}
)


@cache
def example(name: str) -> list[Object]:
    return render(example_values(name))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_in_this_kubernetes(name: str, version: str) -> None:
    if name in NEEDS_LATEST and version != VERSIONS[-1]:
        pytest.skip("this example needs a newer Kubernetes, and says so")
    assert [fault for found in example(name) for fault in faults(found, version)] == []
    assert len([found for found in example(name) if not is_custom(found)]) >= 10


@pytest.mark.skipif("CRD_DIR" not in os.environ, reason="CRD_DIR names no directory of CRDs (*.yaml)")
def test_custom_resources_are_valid_by_the_projects_own_definitions() -> None:
    crds = [yaml.safe_load(path.read_text()) for path in Path(os.environ["CRD_DIR"]).glob("*.yaml")]
    resources = [found for name in EXAMPLES for found in example(name) if is_custom(found)]
    kinds = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute", "InferencePool", "ScaledObject"}
    assert {found["kind"] for found in resources} == kinds
    assert [text for found in resources for text in check_with_crds(found, crds)] == []


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("invariant", INVARIANTS)
def test_objects_hold_together(name: str, invariant: Any) -> None:
    assert invariant(example(name)) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_volumes_are_there(name: str) -> None:
    assert invariants.volumes(example(name), OUTSIDE) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_our_command_line_takes_every_container(name: str) -> None:
    parsed = 0
    for part in pods(example(name)):
        for container in part.containers:
            if "command" not in container:
                parser().parse_args(container["args"])  # exits on a flag that is not there
                parsed += 1
    assert parsed >= 3


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_what_its_golden_says(name: str) -> None:
    path, text = GOLDENS / f"{name}.yaml", golden_text(example(name))
    if os.environ.get("REGENERATE_GOLDENS"):
        path.write_text(text)
    assert path.read_text() == text, "the chart renders something else: see this module's docstring"


def test_every_example_has_a_golden_and_no_golden_is_left_over() -> None:
    assert sorted(path.stem for path in GOLDENS.glob("*.yaml")) == EXAMPLES


def test_defaults_render_and_helm_lint_has_nothing_to_say() -> None:
    assert invariants.selectors(render()) == []
    report = helm_python.lint(CHART, strict=True)
    findings = [message["error"] for message in report["messages"] if message["error"] != "icon is recommended"]
    assert findings == []
    assert report["errors"] == []


def test_rendering_is_the_same_each_time_but_for_the_key() -> None:
    with load_chart() as chart:
        rendered = [objects_of(chart.render(name=RELEASE, namespace=NAMESPACE)) for _ in range(2)]
    first, second = (of_kind(objects, "Secret")[0]["data"]["cluster-key"] for objects in rendered)
    assert first != second
    assert golden_text(rendered[0]) == golden_text(rendered[1])


def test_notes_name_the_service_and_the_test() -> None:
    with load_chart() as chart:
        notes = chart.render(name="demo", namespace="llm")["pd-cluster/templates/NOTES.txt"]
    assert "service/demo-pd-cluster-router 8000:80" in notes
    assert "helm -n llm test demo" in notes


def golden_text(objects: list[Object]) -> str:
    """YAML without what repeats (standard labels), what is random (the key) and what are files of their own."""
    kept = []
    for found in sorted(objects, key=title):
        metadata = {key: value for key, value in found["metadata"].items() if key != "labels"}
        body = {**found, "metadata": metadata}
        if found["kind"] in ("Secret", "ConfigMap"):
            body["data"] = sorted(found["data"])
        kept.append(body)
    return str(yaml.safe_dump_all(kept, sort_keys=True, width=120, default_flow_style=None))
