"""What happens to a running release: scaling and upgrades, what is checked before it, what is left after it."""

from __future__ import annotations

import shutil
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import helm_python
import kubernetes_validate
import pytest

from pd_cluster.launch.flags import config_from
from tests.deploy import invariants
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    ROOT,
    Object,
    example_values,
    load_chart,
    objects_of,
    of_kind,
    one,
    parser,
    render,
    title,
)
from tests.deploy.fake_api import api_server, render_in_cluster, workload

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.config import NodeConfig

ROUTER, DECODE = "demo-pd-cluster-router", "demo-pd-cluster-decode"
KEDA = {"keda": {"prometheus": "http://prometheus:9090"}}
SCALED = [(kind, by) for by in ("hpa", "external") for kind in ("Deployment", "StatefulSet")] + [
    ("StatefulSet", "keda")
]


def scaling(kind: str, by: str) -> dict[str, Any]:
    """Values with an autoscaler of the router, or of the decode nodes."""
    if kind == "Deployment":
        return {"router": {"autoscaling": {"enabled": True, "by": by, "minReplicas": 2}}}
    return {"roles": {"decode": {"autoscaling": {"enabled": True, "by": by, "minReplicas": 2} | KEDA}}}


def replicas_in(kind: str, by: str, running: int | None, asked: list[str]) -> int:
    """What an upgrade with an autoscaler renders while so many pods run; None: there is no such workload."""
    name = ROUTER if kind == "Deployment" else DECODE
    objects = {} if running is None else dict([workload(kind, name, running)])
    with api_server(objects, asked) as url:
        found: int = one(render_in_cluster(url, scaling(kind, by)), kind, name)["spec"]["replicas"]
        return found


@pytest.mark.parametrize(("kind", "by"), SCALED)
def test_an_autoscaler_that_is_switched_on_or_upgraded_keeps_what_runs(kind: str, by: str) -> None:
    asked: list[str] = []
    assert replicas_in(kind, by, 3, asked) == 3
    assert workload(kind, ROUTER if kind == "Deployment" else DECODE, 3)[0] in asked
    assert replicas_in(kind, by, None, []) == 2, "a first install begins with minReplicas"
    stopped = 2 if by == "hpa" else 0
    assert replicas_in(kind, by, 0, []) == stopped, "an HPA would leave a workload of 0 alone for good"


def test_prefill_from_0_begins_with_a_pod_and_stays_at_0() -> None:
    values = {"roles": {"prefill": {"autoscaling": {"enabled": True, "by": "keda", "minReplicas": 0} | KEDA}}}
    for objects, replicas in (({}, 1), (dict([workload("StatefulSet", "demo-pd-cluster-prefill", 0)]), 0)):
        with api_server(objects, []) as url:
            assert one(render_in_cluster(url, values), "StatefulSet", "-prefill")["spec"]["replicas"] == replicas


@pytest.mark.parametrize(("kind", "by"), SCALED)
def test_what_is_rendered_outside_of_the_cluster_leaves_replicas_out(kind: str, by: str) -> None:
    assert "replicas" not in one(render(scaling(kind, by)), kind, ROUTER if kind == "Deployment" else DECODE)["spec"]


def test_without_an_autoscaler_the_values_count_and_no_workload_is_looked_up() -> None:
    asked: list[str] = []
    with api_server(dict([workload("StatefulSet", DECODE, 3)]), asked) as url:
        objects = render_in_cluster(url, {"roles": {"decode": {"replicas": 2}}})
    assert one(objects, "StatefulSet", DECODE)["spec"]["replicas"] == 2
    assert [path for path in asked if path.startswith("/apis/apps")] == []


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_what_something_else_scales_has_no_autoscaler_of_ours(kind: str) -> None:
    objects = render(scaling(kind, "external"))
    assert of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject") == []
    assert invariants.selectors(objects) == []


@pytest.mark.parametrize("part", ["router", "nodeDefaults"])
def test_replicas_of_null_are_refused_and_not_0(part: str) -> None:
    with pytest.raises(helm_python.HelmError, match=r"replicas: null is no number.*by: external"):
        render({part: {"replicas": None}})


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({}, 1020),
        ({"nodeDefaults": {"startDeadlineSeconds": 300}}, 420),
        ({"roles": {"prefill": {"startDeadlineSeconds": 3600}}}, 3720),
        ({"roles": {"host": {"kind": "pair", "startDeadlineSeconds": 1800}}}, 1920),
        ({"router": {"minReadySeconds": 60}}, 1080),
    ],
)
def test_a_rollout_of_the_router_waits_for_the_slowest_node(values: dict[str, Any], seconds: int) -> None:
    assert one(render(values), "Deployment", "-router")["spec"]["progressDeadlineSeconds"] == seconds
    assert rollout(values) == f"--timeout={seconds}s"


def rollout(values: dict[str, Any]) -> str:
    with load_chart() as chart:
        notes = chart.render(values, name=RELEASE, namespace=NAMESPACE)["pd-cluster/templates/NOTES.txt"]
    [line] = [line for line in notes.splitlines() if f"rollout status deployment/{ROUTER}" in line]
    return line.split()[-1]


@pytest.mark.parametrize("readme", ["helm/pd-cluster/README.md", "docs/kubernetes.md"])
def test_the_docs_wait_as_long_as_the_notes(readme: str) -> None:
    told = {line for line in (ROOT / readme).read_text().splitlines() if f"rollout status deployment/{ROUTER}" in line}
    assert {line.split()[-1] for line in told} == {rollout(example_values("cpu-demo"))}, "they install that example"


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        ({}, []),
        ({"gpus": {"count": 1}}, ["--device=cuda"]),
        ({"gpus": {"count": 1, "resource": "amd.com/gpu"}}, ["--device=cuda"]),
        ({"gpus": {"claimTemplate": "one"}}, ["--device=cuda"]),
        ({"gpus": {"count": 1}, "args": {"device": "cpu"}}, ["--device=cpu"]),
        ({"args": {"device": "cuda"}}, ["--device=cuda"]),
    ],
)
def test_a_node_with_gpus_must_find_one(role: dict[str, Any], flags: list[str]) -> None:
    objects = render({"roles": {"decode": role}, "preflight": {"enabled": True}})
    for kind in ("StatefulSet", "Job"):
        [container] = one(objects, kind, "-decode")["spec"]["template"]["spec"]["containers"]
        assert [argument for argument in container["args"] if argument.startswith("--device")] == flags
        asked = [name for name in container["resources"]["limits"] if name.endswith("/gpu")]
        gpus = role.get("gpus", {})
        assert asked == ([gpus.get("resource", "nvidia.com/gpu")] if gpus.get("count") else [])


PAIR = {"kind": "pair", "gpus": {"count": 1, "claimTemplate": "three"}, "pair": {"decode": {"gpus": {"count": 2}}}}
OF_NODES = {"tp": 2, "max-model-len": 8192, "logits-stage": ["a:B", "c:D"]}
CHECKED: dict[str, dict[str, Any]] = {name: example_values(name) for name in EXAMPLES} | {
    "two in a pod": {"roles": {"decode": None, "host": PAIR}, "slo": {"ttftMs": 400}, "nodeTls": {"secret": "tls"}},
    "a model in the image": {"model": {"id": "/opt/model"}, "nodeDefaults": {"args": OF_NODES}},
}
# before the first install: the key, certificates
NOT_THERE_YET = {"host", "port", "node_id", "cluster_key_file", "tls_cert", "tls_key", "tls_ca", "tls_name"}


@pytest.mark.parametrize("name", CHECKED)
def test_preflight_checks_the_nodes_that_will_run(name: str) -> None:
    objects = render(CHECKED[name] | {"preflight": {"enabled": True}})
    compared = 0
    for job in of_kind(objects, "Job"):
        role = job["metadata"]["name"].rpartition("-preflight-")[2]
        checks, nodes = (found["spec"]["template"]["spec"] for found in (job, one(objects, "StatefulSet", f"-{role}")))
        assert checks.get("shareProcessNamespace") == nodes.get("shareProcessNamespace")
        for check, node in zip(checks["containers"], nodes["containers"], strict=True):
            assert configured(check) == configured(node, but="model" if "--skip-model" in check["args"] else "")
            assert check["resources"] == node["resources"]
            assert variables(check) == variables(node)
            compared += 1
    assert compared >= 2


def configured(container: dict[str, Any], but: str = "") -> NodeConfig:
    """What a container's arguments configure, less what a preflight cannot know."""
    given = vars(parser().parse_args(container["args"]))
    if "ports" in given:
        assert given["ports"] in ([8100], [8102])
    return config_from(Namespace(**{name: value for name, value in given.items() if name not in NOT_THERE_YET | {but}}))


def variables(container: dict[str, Any]) -> list[Any]:
    return [found for found in container["env"] if found["name"] in ("CUDA_VISIBLE_DEVICES", "PD_ADVERTISE_HOST")]


@pytest.mark.parametrize(
    ("model", "is_checked"),
    [
        ({}, True),
        ({"id": "Qwen/Qwen3-8B"}, False),
        ({"id": "/models/x"}, False),
        ({"id": "/models/x", "existingClaim": "weights"}, True),
        ({"id": "/models/x", "volume": {"nfs": {"server": "nas", "path": "/x"}}}, True),
        ({"id": "/opt/x"}, True),
    ],
)
def test_preflight_downloads_no_model(model: dict[str, Any], is_checked: bool) -> None:
    values = {"model": model, "preflight": {"enabled": True}}
    fetching = {"nodeDefaults": {"initContainers": [{"name": "fetch", "image": "aws-cli"}]}}
    for given, expected in ((values, is_checked), (values | fetching, is_checked and not model)):
        job = one(render(given), "Job", "-decode")
        assert ("--skip-model" not in job["spec"]["template"]["spec"]["containers"][0]["args"]) is expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_deletes_all_but_what_the_readme_deletes(name: str) -> None:
    """`helm uninstall` leaves hooks alone: a Pod and Jobs, which the README's command finds by their labels."""
    objects = render(example_values(name) | {"preflight": {"enabled": True}})
    hooks = [found for found in objects if "helm.sh/hook" in found["metadata"].get("annotations", {})]
    assert {found["kind"] for found in hooks} == {"Pod", "Job"}
    for readme in (CHART / "README.md", ROOT / "docs" / "kubernetes.md"):
        [line] = [line for line in readme.read_text().splitlines() if "delete pod,job,configmap -l " in line]
        wanted = line.partition(" -l ")[2].strip("`").split(",")
        for found in hooks:
            assert set(wanted) <= {f"{key}={value}" for key, value in found["metadata"]["labels"].items()}
    for found in hooks:
        policy = found["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        assert "hook-failed" not in policy, "what failed is to be read"
        assert ("hook-succeeded" in policy) is (found["kind"] == "Job"), "Helm 3 reads a test's log after its deletion"
        assert found["kind"] == "Pod" or found["spec"]["ttlSecondsAfterFinished"] == 3600
    kept = [title(found) for found in objects if "helm.sh/resource-policy" in found["metadata"].get("annotations", {})]
    assert all(name.startswith("PersistentVolumeClaim/") for name in kept)


def by_title(objects: list[Object]) -> dict[str, Object]:
    """What Helm applies: hooks are not part of it."""
    applied = {
        title(found): found for found in objects if "helm.sh/hook" not in found["metadata"].get("annotations", {})
    }
    applied.pop("Secret/demo-pd-cluster-key", None)  # random in each of these
    return applied


def between(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The objects that an upgrade from these values to those changes."""
    old, new = by_title(render(before)), by_title(render(after))
    assert old.keys() == new.keys()
    return {name for name in old if old[name] != new[name]}


NODES = {"StatefulSet/demo-pd-cluster-prefill", "StatefulSet/demo-pd-cluster-decode"}
ROUTERS = {"Deployment/demo-pd-cluster-router"}


def test_an_upgrade_of_one_part_after_the_other_by_partitions() -> None:
    """The commands of docs/operations.md: each changes what the docs say of it."""
    text = (ROOT / "docs" / "operations.md").read_text().replace("\\\n", " ")
    commands = [line.split("--set ")[1:] for line in text.splitlines() if line.startswith("helm -n llm upgrade demo ")]
    steps = [upgraded("nodeDefaults.replicas=3", *map(str.strip, sets)) for sets in commands]
    first, second, third = steps
    assert between(upgraded("nodeDefaults.replicas=3", "image.tag=0.1.0"), first) == ROUTERS | NODES
    assert between(first, second) == between(second, third) == NODES
    for values, partition in ((first, 1000), (second, 2)):
        for found in of_kind(render(values), "StatefulSet"):
            assert found["spec"]["updateStrategy"]["rollingUpdate"]["partition"] == partition
            assert (
                found["spec"]["template"]
                == one(render(third), "StatefulSet", found["metadata"]["name"])["spec"]["template"]
            )
            kubernetes_validate.validate(found, "1.29", strict=True)


def upgraded(*expressions: str) -> dict[str, Any]:
    """The values of a command with these `--set`."""
    return helm_python.parse_set_string(",".join(expressions))


def test_an_upgrade_of_one_part_after_the_other_by_images() -> None:
    old: dict[str, Any] = {"image": {"tag": "0.1.0"}}
    routers_first = {"image": {"tag": "0.1.0"}, "router": {"image": {"tag": "0.2.0"}}}
    assert between(old, routers_first) == ROUTERS
    assert between(routers_first, {"image": {"tag": "0.2.0"}}) == NODES


def test_a_new_version_of_the_chart_restarts_no_pod_by_itself(tmp_path: Path) -> None:
    """Its version is in the labels of objects, and in no pod."""
    newer = tmp_path / "pd-cluster"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace("0.1.0", "9.9.9"))
    values = example_values("lmcache-pool") | {"image": {"tag": "0.1.0"}}
    with helm_python.Chart.load(newer) as chart:
        new = by_title(objects_of(chart.render(values, name=RELEASE, namespace=NAMESPACE)))
    old = by_title(render(values))
    workloads = [name for name in old if name.startswith(("Deployment/", "StatefulSet/"))]
    assert len(workloads) == 4
    for name in workloads:
        assert new[name]["metadata"]["labels"]["helm.sh/chart"] == "pd-cluster-9.9.9"
        assert new[name]["spec"] == old[name]["spec"]
