"""deploy/ray: what KubeRay is given, and what must hold between its objects. No cluster and no image is made here.

The schemas are hand-written parts of KubeRay's (ray.io/v1), in which unknown fields are refused; the whole files were
last validated against the resource definitions of KubeRay 1.7.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pd_cluster.launch.cli import build_parser
from pd_cluster.launch.on_ray.spec import read_spec
from tests.cluster import ROOT
from tests.deadlines import HANG_S

DEPLOY = ROOT / "deploy" / "ray"
KUBERNETES = ("1.30", "1.34")
TEXT = {"type": "string", "minLength": 1}
STRINGS = {"type": "object", "additionalProperties": TEXT}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


POD_TEMPLATE = closed(["spec"], metadata={"type": "object"}, spec={"type": "object"})
WORKERS = closed(
    ["groupName", "minReplicas", "maxReplicas", "template"],
    groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, rayStartParams=STRINGS, template=POD_TEMPLATE,
)  # fmt: skip
SCHEMAS = {
    "RayCluster": closed(
        ["headGroupSpec"],
        rayVersion=TEXT,
        authOptions=closed([], mode={"enum": ["disabled", "token"]}, secretName=TEXT),
        headGroupSpec=closed(["template"], rayStartParams=STRINGS, template=POD_TEMPLATE),
        workerGroupSpecs={"type": "array", "items": WORKERS},
    ),
    "RayJob": closed(
        ["entrypoint"], clusterSelector=STRINGS, entrypoint=TEXT, shutdownAfterJobFinishes={"type": "boolean"},
        backoffLimit=COUNT,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """By kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def pods(objects: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    spec = objects["RayCluster"]["spec"]
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_kuberays_own_objects_have_its_shape(objects: dict[str, dict[str, Any]], kind: str) -> None:
    jsonschema.validate(objects[kind]["spec"], SCHEMAS[kind])
    assert objects[kind]["apiVersion"] == "ray.io/v1"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**objects[kind]["spec"], "replica": 1}, SCHEMAS[kind])


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_rest_is_kubernetes(objects: dict[str, dict[str, Any]], version: str) -> None:
    metadata = {"name": "pod"}
    made = [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec} for spec in pods(objects)]
    for document in (objects["ConfigMap"], objects["Service"], objects["NetworkPolicy"], *made):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_cluster_in_it_is_one_and_has_room(objects: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(objects["ConfigMap"]["data"]["cluster.yaml"])
    spec = read_spec(file)
    (group,) = objects["RayCluster"]["spec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = group["replicas"] * int(limits["nvidia.com/gpu"])
    assert sum(spec.role(role).gpus * count for role, count in spec.counts.items()) == gpus
    assert all(spec.role(role).cpus <= int(limits["cpu"]) for role in ("prefill", "decode"))
    mounts = [mount["mountPath"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]]
    assert any(str(spec.flags["model"]).startswith(mount) for mount in mounts)


def test_the_router_is_where_the_service_looks(objects: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(objects["ConfigMap"]["data"]["cluster.yaml"])
    spec = read_spec(file)
    head = objects["RayCluster"]["spec"]["headGroupSpec"]
    offered = yaml.safe_load(yaml.safe_load(head["rayStartParams"]["resources"]))  # quoted twice, for a shell
    assert spec.router.resources.items() <= offered.items()
    assert spec.router.cpus <= int(head["rayStartParams"]["num-cpus"])
    (container,) = head["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (port,) = objects["Service"]["spec"]["ports"]
    assert ports[port["targetPort"]] == spec.router_port
    cluster = objects["RayCluster"]["metadata"]["name"]
    assert objects["Service"]["spec"]["selector"] == {"ray.io/cluster": cluster, "ray.io/node-type": "head"}
    assert objects["RayJob"]["spec"]["clusterSelector"] == {"ray.io/cluster": cluster}


def test_node_pods_hear_pods_of_their_ray_cluster_only(objects: dict[str, dict[str, Any]]) -> None:
    """Others reach named ports of the head: KubeRay and its job the dashboard, clients the router."""
    policy, (head, *workers) = objects["NetworkPolicy"]["spec"], pods(objects)
    of_cluster = {"ray.io/cluster": objects["RayCluster"]["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == of_cluster
    assert policy["policyTypes"] == ["Ingress"]
    inside, ray_jobs, clients = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": of_cluster}}]}
    job = {"batch.kubernetes.io/job-name": objects["RayJob"]["metadata"]["name"]}
    assert {"podSelector": {"matchLabels": job}} in ray_jobs["from"]
    offered = {port["name"] for container in head["containers"] for port in container["ports"]}
    for rule, port in ((ray_jobs, "dashboard"), (clients, "router")):
        assert [one["port"] for one in rule["ports"]] == [port]
        assert port in offered
        assert not any(one["name"] == port for pod in workers for c in pod["containers"] for one in c.get("ports", []))
    assert not any(pod.get("hostNetwork") for pod in pods(objects))


def test_everything_is_authenticated_and_no_secret_is_in_the_file(objects: dict[str, dict[str, Any]]) -> None:
    assert objects["RayCluster"]["spec"]["authOptions"] == {"mode": "token"}
    (head, *workers) = pods(objects)
    (key,) = head["containers"][0]["env"]
    assert key["name"] == "PD_CLUSTER_KEY"
    assert set(key["valueFrom"]) == {"secretKeyRef"}
    assert not any("env" in container for worker in workers for container in worker["containers"])  # it comes by Ray


def test_the_job_says_what_the_command_line_knows(objects: dict[str, dict[str, Any]]) -> None:
    program, *arguments = objects["RayJob"]["spec"]["entrypoint"].split()
    parsed = build_parser().parse_args(arguments)
    assert (program, parsed.ray_command) == ("pd-cluster", "up")
    (head, *_) = pods(objects)
    volume = {volume["name"]: volume for volume in head["volumes"]}
    mount = next(m for m in head["containers"][0]["volumeMounts"] if parsed.file.startswith(m["mountPath"]))
    assert volume[mount["name"]]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    assert objects["RayJob"]["spec"]["shutdownAfterJobFinishes"] is False  # else the cluster would go with it


def test_ray_is_of_one_version_everywhere(objects: dict[str, dict[str, Any]]) -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert objects["RayCluster"]["spec"]["rayVersion"] == pinned.group(1)
    images = re.findall(r"rayproject/ray:([\d.]+)-", (DEPLOY / "Dockerfile").read_text())
    assert images
    assert set(images) == {pinned.group(1)}
    names = {container["image"] for pod in pods(objects) for container in pod["containers"]}
    assert len(names) == 1


def test_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--no-color", str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=HANG_S, cwd=DEPLOY
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert (DEPLOY / "Dockerfile.dockerignore").read_text() == (ROOT / "deploy/Dockerfile.dockerignore").read_text()
