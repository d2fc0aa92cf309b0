"""Volumes that operators add to the pods, and several names of one model: cases 12 and 13 of the public cases."""

from __future__ import annotations

import copy
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from tests.deploy import invariants
from tests.deploy.chart import Object, of_kind, one, render
from tests.deploy.test_chart_values import nodes_of

VERSION = kubernetes_validate.latest_version()
ADDED: dict[str, Any] = {
    "extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/company-ca", "readOnly": True}],
}
EVERYWHERE: dict[str, Any] = {
    "nodeDefaults": ADDED,
    "router": ADDED,
    "pool": {"enabled": True, **ADDED},
    "test": ADDED,
    "preflight": {"enabled": True},
    "roles": {"host": {"kind": "pair", "gpus": {"count": 0}}},
}


def pods(objects: list[Object]) -> dict[str, dict[str, Any]]:
    """The spec of each pod that the chart makes, by its object's kind and name."""
    templates = {
        (found["kind"], found["metadata"]["name"]): found["spec"]["template"]["spec"]
        for found in of_kind(objects, "StatefulSet", "Deployment", "Job", "DaemonSet")
    }
    single = {("Pod", found["metadata"]["name"]): found["spec"] for found in of_kind(objects, "Pod")}
    return {" ".join(name): spec for name, spec in (templates | single).items()}


def test_volumes_are_added_to_every_pod_that_the_chart_makes() -> None:
    """A new template fails here until it has them."""
    objects = render(EVERYWHERE)
    found = pods(objects)
    assert len(found) >= 8, "nodes of three roles, their preflights, router, pool, test"
    for name, spec in found.items():
        assert ADDED["extraVolumes"][0] in spec["volumes"], name
        for container in spec["containers"]:
            assert ADDED["extraVolumeMounts"][0] in container["volumeMounts"], name
    for one_of_them in objects:
        if one_of_them["apiVersion"] in ("v1", "apps/v1", "batch/v1"):
            kubernetes_validate.validate(one_of_them, VERSION, strict=True)
    assert invariants.volumes(objects, frozenset({"ConfigMap/company-ca"})) == []


def test_a_preflight_mounts_no_volume_that_it_has_not() -> None:
    """The model's volume, mounted a second time, is there in a preflight only where it exists before the install."""
    mounts = [{"name": name, "mountPath": f"/again/{name}"} for name in ("models", "mine", "cluster-key")]
    values = {
        "preflight": {"enabled": True},
        "nodeDefaults": {"extraVolumes": [{"name": "mine", "emptyDir": {}}], "extraVolumeMounts": mounts},
    }
    for model, expected in (({}, {"mine"}), ({"existingClaim": "weights"}, {"mine", "models"})):
        [check] = pods(render(values | {"model": model}))["Job demo-pd-cluster-preflight-decode"]["containers"]
        assert {mount["name"] for mount in check["volumeMounts"] if mount in mounts} == expected


def test_the_case_of_a_template_and_certificates() -> None:
    templates = [{"name": "templates", "configMap": {"name": "chat-templates"}}]
    mounts = [{"name": "templates", "mountPath": "/etc/templates", "readOnly": True}]
    defaults = {"extraVolumes": templates, "extraVolumeMounts": mounts, "args": {"chat-template": "/etc/templates/c"}}
    objects = render({"model": {"id": "Qwen/Qwen3-8B"}, "nodeDefaults": defaults, "router": ADDED})
    for role in ("prefill", "decode"):
        spec = one(objects, "StatefulSet", f"-{role}")["spec"]["template"]["spec"]
        assert templates[0] in spec["volumes"]
        assert "--chat-template=/etc/templates/c" in spec["containers"][0]["args"]
    assert ADDED["extraVolumes"][0] not in spec["volumes"], "that is the router's"


def test_a_role_has_its_own_list() -> None:
    own = {"extraVolumes": [{"name": "mine", "emptyDir": {}}], "extraVolumeMounts": []}
    objects = render({"nodeDefaults": ADDED, "roles": {"decode": own}})
    volumes = one(objects, "StatefulSet", "-decode")["spec"]["template"]["spec"]["volumes"]
    assert "mine" in [volume["name"] for volume in volumes]
    assert "ca" not in [volume["name"] for volume in volumes]


@pytest.mark.parametrize(
    "values",
    [
        {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]},
        {"extraVolumeMounts": [{"name": "ca", "mountPath": "/tmp"}]},
        {"extraVolumes": [{"emptyDir": {}}]},
        {"extraVolumeMounts": [{"name": "ca"}]},
        {"extraVolumeMounts": [{"name": "ca", "mountPath": "relative"}]},
    ],
)
@pytest.mark.parametrize("where", ["nodeDefaults", "router"])
def test_what_kubernetes_would_refuse_is_refused(where: str, values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError, match="extraVolume"):
        render({where: values})


@pytest.mark.parametrize("where", ["roles.prefill", "router", "pool", "test"])
def test_no_volume_of_the_chart_can_be_taken(where: str) -> None:
    """Each volume that a template writes, in each shape of the release."""
    tls = {"apiKeys": {"secret": "a"}, "tlsSecret": "b", "inferencePool": {"enabled": True, "tlsSecret": "c"}}
    policy: dict[str, Any] = {"networkPolicy": {"enabled": False}, "pool": {"enabled": True}}
    for shape in (policy | {"router": tls}, policy | {"nodeTls": {"secret": "d"}}):
        [spec] = [found for name, found in pods(render(shape)).items() if name.endswith(f"-{where.split('.')[-1]}")]
        for taken in (volume["name"] for volume in spec["volumes"]):
            values = copy.deepcopy(shape)
            place = values
            for key in where.split("."):
                place = place.setdefault(key, {})
            place["extraVolumes"] = [{"name": taken, "emptyDir": {}}]
            with pytest.raises(helm_python.HelmError) as refused:
                render(values)
            assert f"{where}.extraVolumes: the pod has {taken} among its volumes already" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("", []), ([], []), ("qwen3", ["qwen3"]), (["Qwen/Qwen3-8B", "qwen3", "claude-haiku-4-5"],) * 2,
        ('a "b", c', ['a "b", c']),
    ],
)  # fmt: skip
def test_a_model_may_have_several_names(given: Any, names: list[str]) -> None:
    for role in ("prefill", "decode"):
        (arguments,) = nodes_of(render({"model": {"servedName": given}}), role)
        written = [one for one in arguments if one.startswith("--served-model-name")]
        assert written == [f"--served-model-name={name}" for name in names]


def test_names_are_texts() -> None:
    for wrong in ([""], ["a", "a"], [1], {"a": 1}):
        with pytest.raises(helm_python.HelmError, match="servedName"):
            render({"model": {"servedName": wrong}})
