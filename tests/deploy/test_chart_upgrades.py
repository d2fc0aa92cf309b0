"""Upgrades of a release that an earlier version of the chart made: what Helm and the API server refuse."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    Object,
    example_values,
    load_chart,
    of_kind,
    one,
    render,
    title,
)

if TYPE_CHECKING:
    from pathlib import Path

# Hooks of earlier versions. Helm leaves them in the cluster without the annotations by which a release owns an object.
EARLIER_HOOKS = {"ConfigMap/demo-pd-cluster-test", "Pod/demo-pd-cluster-test"}
NEW = ("serviceAccount", "envFrom", "initContainers", "extraContainerSpec", "minReadySeconds")


@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_no_object_takes_the_name_of_a_hook_that_was_left(name: str) -> None:
    """`invalid ownership metadata`: the upgrade would fail wherever `helm test` has run."""
    objects = render(example_values(name) if name else None)
    made = {title(found) for found in objects if "helm.sh/hook" not in found["metadata"].get("annotations", {})}
    assert len(made) >= 10
    assert made & EARLIER_HOOKS == set()
    test = one(objects, "Pod", "-test")["spec"]["volumes"][0]["configMap"]["name"]
    assert f"ConfigMap/{test}" in made


@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_what_cannot_change_has_not(name: str) -> None:
    """Fields that the API server lets nothing change in an object that is there, as of the first version."""
    objects = render(example_values(name) if name else None)
    for found in of_kind(objects, "StatefulSet", "Deployment"):
        part = found["metadata"]["name"].removeprefix("demo-pd-cluster-")
        assert found["spec"]["selector"] == {"matchLabels": labels(part)}
        if found["kind"] == "StatefulSet":
            assert found["spec"]["serviceName"] == found["metadata"]["name"]
            assert found["spec"]["podManagementPolicy"] == "Parallel"
            assert "volumeClaimTemplates" not in found["spec"]
            assert one(objects, "Service", f"-{part}")["spec"]["clusterIP"] == "None"
    [binding] = of_kind(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == "demo-pd-cluster-router"


def labels(part: str) -> dict[str, str]:
    names = {"name": "pd-cluster", "instance": RELEASE, "component": part}
    return {f"app.kubernetes.io/{key}": value for key, value in names.items()}


def test_reused_values_of_an_earlier_version_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """`--reuse-values` puts the defaults of the version before in place of this one's."""
    earlier = tmp_path / "pd-cluster"
    shutil.copytree(CHART, earlier)
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    for top in ("podSecurityContext", "containerSecurityContext", "commonLabels", "extraObjects", "envFrom"):
        del values[top]
    for part in ("router", "nodeDefaults"):
        values[part] = {key: value for key, value in values[part].items() if key not in NEW}
        values[part]["podDisruptionBudget"] = {"enabled": True, "maxUnavailable": 1}
    (earlier / "values.yaml").write_text(yaml.safe_dump(values))
    with helm_python.Chart.load(earlier) as chart, pytest.raises(helm_python.HelmError) as refused:
        chart.render({}, name=RELEASE, namespace=NAMESPACE)
    assert "router.serviceAccount: it is missing" in str(refused.value)
    assert "use --reset-then-reuse-values, or give your files again" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, []),
        ({"router": {"podDisruptionBudget": {"minAvailable": 1}}}, ["router"]),
        ({"router": {"replicas": 2, "podDisruptionBudget": {"minAvailable": "50%"}}}, []),
        ({"roles": {"decode": {"replicas": 3, "podDisruptionBudget": {"minAvailable": "67%"}}}}, ["decode"]),
        ({"nodeDefaults": {"podDisruptionBudget": {"maxUnavailable": 0}}}, ["decode", "prefill"]),
        ({"nodeDefaults": {"podDisruptionBudget": {"maxUnavailable": 0, "enabled": False}}}, []),
        ({"nodeDefaults": {"replicas": 2, "podDisruptionBudget": {"minAvailable": 1}}}, []),
        ({"router": {"autoscaling": {"enabled": True}, "podDisruptionBudget": {"minAvailable": 2}}}, ["router"]),
    ],
)
def test_notes_say_which_budget_lets_no_machine_be_drained(values: dict[str, Any], parts: list[str]) -> None:
    with load_chart() as chart:
        notes = chart.render(values, name=RELEASE, namespace=NAMESPACE)["pd-cluster/templates/NOTES.txt"]
    told = [line.split()[2] for line in notes.splitlines() if line.startswith("podDisruptionBudget of ")]
    assert told == parts
