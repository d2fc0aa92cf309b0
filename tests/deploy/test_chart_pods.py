"""What every pod follows: images, security contexts, accounts, variables, free fields, the model's volume."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy import invariants
from tests.deploy.chart import (
    EXAMPLES,
    NAMESPACE,
    ROOT,
    Object,
    PodPart,
    changed,
    example_values,
    load_chart,
    of_kind,
    one,
    pods,
    render,
)
from tests.deploy.pod_security import SCC_ANNOTATION, admit_to_project, restricted

PARTS: dict[str, Any] = {"pool": {"enabled": True}, "preflight": {"enabled": True}}  # with these every pod is there
AS_ROOT = ("xpyd-rdma",)  # rootWithIpcLock, which the level forbids: values.yaml says so
DIGEST = "sha256:" + "1" * 64
READ_ONLY: dict[str, dict[str, Any]] = {
    "claim": {"existingClaim": "weights", "readOnly": True},
    "read-only claim": {"volume": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}},
    "image": {"volume": {"image": {"reference": "r/m:1"}}},
    "nfs": {"volume": {"nfs": {"server": "s", "path": "/p", "readOnly": True}}},
    "csi": {"volume": {"csi": {"driver": "d", "readOnly": True}}},
}


@cache
def example(name: str) -> list[Object]:
    return render(example_values(name))


def found_pods(values: dict[str, Any]) -> dict[str, PodPart]:
    return {part.owner.partition("/")[2].removeprefix("demo-pd-cluster-"): part for part in pods(render(values))}


def images(values: dict[str, Any]) -> dict[str, str]:
    return {name: part.serving[0]["image"] for name, part in found_pods(PARTS | values).items()}


def environment(container: dict[str, Any]) -> dict[str, str]:
    names = [entry["name"] for entry in container["env"]]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


@pytest.mark.parametrize("name", ["", *(name for name in EXAMPLES if name not in AS_ROOT)])
def test_the_level_restricted_admits_every_pod(name: str) -> None:
    parts = list(pods(example(name) if name else render(PARTS)))
    assert {part.owner: restricted(part.spec) for part in parts if restricted(part.spec)} == {}
    assert len(parts) >= 3


def test_the_level_refuses_what_it_should() -> None:
    [spec] = [part.spec for part in pods(example("xpyd-rdma")) if part.owner == "StatefulSet/demo-pd-cluster-decode"]
    assert restricted(spec) == ["node: has capabilities", "node: may be root"]
    for source in ("nfs", "hostPath"):
        other = found_pods({"model": {"volume": {source: {"path": "/models"}}}})["decode"]
        assert restricted(other.spec) == ["volume models"]


def test_openshift_gives_its_own_user_and_group() -> None:
    parts = list(pods(example("openshift")))
    for part in parts:
        context = admit_to_project(part.spec)["securityContext"]
        assert context["runAsUser"] == context["fsGroup"] >= 1000680000
        assert "runAsGroup" not in context, "0: what an image lets its root group read"
    with pytest.raises(ValueError, match="user 10001 is not of the project; group 10001"):
        admit_to_project(next(pods(render())).spec)
    for found in of_kind(example("openshift"), "StatefulSet", "Deployment"):
        assert found["spec"]["template"]["metadata"]["annotations"] == {SCC_ANNOTATION: "restricted-v2"}


def test_every_pod_has_its_image_and_security_context() -> None:
    """A new template fails here until it does."""
    values = PARTS | {"podSecurityContext": {"runAsUser": 7}, "containerSecurityContext": {"procMount": "Default"}}
    image = {"repository": "r", "tag": "t", "pullPolicy": "Always"}
    parts = list(pods(render(values | {"image": image, "imagePullSecrets": [{"name": "s"}]})))
    assert len(parts) == 7, "two roles and their preflights, router, pool, test"
    for part in parts:
        assert part.spec["securityContext"]["runAsUser"] == 7
        assert part.spec["imagePullSecrets"] == [{"name": "s"}]
        for container in part.containers:
            assert (container["image"], container["imagePullPolicy"]) == ("r:t", "Always")
            assert container["securityContext"]["procMount"] == "Default"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"image": {"repository": "a", "digest": DIGEST}, "router": {"image": {"repository": "b"}}},
         {"router": "b:0.1.0", "test": "b:0.1.0", "decode": f"a@{DIGEST}", "pool": f"a@{DIGEST}"}),
        ({"image": {"repository": "a", "tag": "1"}, "nodeDefaults": {"image": {"tag": "2"}}},
         {"router": "a:1", "test": "a:1", "decode": "a:2", "pool": "a:2", "preflight-decode": "a:2"}),
        ({"image": {"repository": "a", "digest": DIGEST}, "roles": {"decode": {"image": {"tag": "2"}}}},
         {"decode": "a:2", "preflight-decode": "a:2", "prefill": f"a@{DIGEST}"}),
        ({"nodeDefaults": {"image": {"repository": "b", "digest": DIGEST}},
          "roles": {"decode": {"image": {"repository": "c"}}}},
         {"router": "pd-cluster:0.1.0", "prefill": f"b@{DIGEST}", "decode": "c:0.1.0"}),
    ],
)  # fmt: skip
def test_an_own_repository_has_an_own_tag_and_digest(values: dict[str, Any], expected: dict[str, str]) -> None:
    assert expected.items() <= images(values).items()


def test_the_most_particular_variable_holds_and_none_is_there_twice() -> None:
    def given(value: str) -> list[dict[str, str]]:
        return [{"name": "A", "value": value}, {"name": "HOME", "value": f"/{value}"}]

    sources = [{"secretRef": {"name": name}} for name in ("all", "own")]
    parts = found_pods({
        "env": given("all"), "envFrom": sources[:1], "preflight": {"enabled": True},
        "nodeDefaults": {"env": given("nodes"), "envFrom": sources[1:]}, "roles": {"decode": {"env": given("decode")}},
        "router": {"envFrom": sources[1:]},
    })  # fmt: skip
    for name, value in (("router", "all"), ("prefill", "nodes"), ("decode", "decode"), ("preflight-decode", "decode")):
        found = environment(parts[name].serving[0])
        assert (found["A"], found["HOME"]) == (value, f"/{value}"), name
        assert parts[name].serving[0]["envFrom"] == sources


def test_a_variable_comes_after_those_that_it_names() -> None:
    """$(NAME) is replaced by an earlier variable only. Before, one in place of the chart's stood before the user's."""
    given = [{"name": "CACHE", "value": "/cache"}, {"name": "HF_HOME", "value": "$(CACHE)/$(POD_NAME)"}]
    own = [{"name": "CACHE", "value": "/mine"}]
    names = list(environment(found_pods({"env": given, "nodeDefaults": {"env": own}})["decode"].serving[0]))
    assert names.index("POD_NAME") < names.index("CACHE") < names.index("HF_HOME")


def test_free_fields_are_merged_and_never_written_twice() -> None:
    """Before, resourceClaims and shareProcessNamespace were keys that came twice."""
    extra = {
        "extraPodSpec": {
            "resourceClaims": [{"name": "imex", "resourceClaimTemplateName": "t"}], "shareProcessNamespace": False,
            "enableServiceLinks": None, "securityContext": {"fsGroupChangePolicy": "Always"},
        },
        "extraContainerSpec": {"livenessProbe": {"failureThreshold": 12}, "resources": {"claims": [{"name": "imex"}]}},
    }  # fmt: skip
    pair = {"kind": "pair", "gpus": {"count": 1, "claimTemplate": "gpus"}}
    values = {"nodeDefaults": extra, "roles": {"host": pair}, "router": {"extraContainerSpec": {"tty": True}}}
    spec = found_pods(values)["host"].spec
    assert [claim["name"] for claim in spec["resourceClaims"]] == ["gpus", "imex"]
    assert spec["shareProcessNamespace"] is False
    assert "enableServiceLinks" not in spec
    assert spec["securityContext"]["runAsUser"] == 10001
    for container in spec["containers"]:
        assert (container["livenessProbe"]["failureThreshold"], container["livenessProbe"]["periodSeconds"]) == (12, 10)
        assert container["resources"]["claims"] == [{"name": "gpus"}, {"name": "imex"}]
    with load_chart() as chart:
        manifests = chart.render(values, name="demo", namespace=NAMESPACE)
    for path, text in manifests.items():
        assert "podOf" not in text, path
        if not path.endswith("NOTES.txt"):
            list(yaml.load_all(text, Loader=StrictLoader))


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"twice in one map: {keys}"
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def test_init_containers_are_nodes_alone_and_hardened() -> None:
    own = [
        {"name": "a", "securityContext": {"readOnlyRootFilesystem": False}},
        {"name": "b", "image": "x:1", "volumeMounts": [{"name": "models", "mountPath": "/models"}]},
    ]
    parts = found_pods({"nodeDefaults": {"initContainers": own, "image": {"tag": "7"}}, "preflight": {"enabled": True}})
    first, second = parts["decode"].spec["initContainers"]
    assert (first["image"], second["image"]) == ("pd-cluster:7", "x:1")
    assert first["securityContext"]["readOnlyRootFilesystem"] is False
    assert restricted(parts["decode"].spec) == []
    assert not any("initContainers" in parts[name].spec for name in ("router", "preflight-decode", "test"))


def test_the_role_of_the_router_goes_to_its_account() -> None:
    for given, name in (({}, "demo-pd-cluster-router"), ({"name": "a"}, "a"), ({"create": False, "name": "b"}, "b")):
        objects = render({"router": {"serviceAccount": given}})
        assert one(objects, "Deployment", "-router")["spec"]["template"]["spec"]["serviceAccountName"] == name
        assert [subject["name"] for subject in of_kind(objects, "RoleBinding")[0]["subjects"]] == [name]
        made = [found["metadata"]["name"] for found in of_kind(objects, "ServiceAccount")]
        assert made == ([] if given.get("create") is False else [name])
        assert invariants.router_knows_nodes(objects) == []


def test_a_preflight_names_no_account_that_is_not_there_yet() -> None:
    made = found_pods({"nodeDefaults": {"serviceAccount": {"create": True}}, **PARTS})
    assert made["decode"].spec["serviceAccountName"] == "demo-pd-cluster-decode"
    assert "serviceAccountName" not in made["preflight-decode"].spec
    named = found_pods({"nodeDefaults": {"serviceAccount": {"name": "x"}}, **PARTS})
    assert named["decode"].spec["serviceAccountName"] == named["preflight-decode"].spec["serviceAccountName"] == "x"
    assert "serviceAccountName" not in named["pool"].spec


@pytest.mark.parametrize("source", READ_ONLY.values(), ids=READ_ONLY)
def test_nothing_is_stored_in_a_volume_that_cannot_be_written(source: dict[str, Any]) -> None:
    parts = found_pods({"model": {"id": "/models/m", **source, "subPath": "s"}, **PARTS})
    mount = {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "s"}
    assert mount in parts["decode"].serving[0]["volumeMounts"]
    assert environment(parts["decode"].serving[0])["HF_HOME"] == "/tmp/huggingface"
    check = parts["preflight-decode"].serving[0]
    assert mount in check["volumeMounts"]
    assert "--model=/models/m" in check["args"]
    with pytest.raises(helm_python.HelmError, match="Qwen/Qwen3-8B is of the hub, and nothing can be downloaded"):
        render({"model": {"id": "Qwen/Qwen3-8B", **source}})
    cached = {"env": [{"name": "HF_HUB_CACHE", "value": "/models"}, {"name": "HF_HUB_OFFLINE", "value": "1"}]}
    assert render({"model": {"id": "Qwen/Qwen3-8B", **source}, **cached})


def test_the_pod_of_a_model_that_is_written_is_as_before() -> None:
    for model in ({}, {"claim": {"create": True}}, {"existingClaim": "a"}, {"volume": {"nfs": {"server": "s"}}}):
        node = found_pods({"model": {"id": "Qwen/Qwen3-8B", **model}})["decode"].serving[0]
        assert {"name": "models", "mountPath": "/models"} in node["volumeMounts"]
        assert environment(node)["HF_HOME"] == "/models/huggingface"


def test_a_key_without_a_value_is_an_empty_one() -> None:
    """`env:` with nothing after it, as files of values often have it, is null."""
    lists = dict.fromkeys(("env", "envFrom", "initContainers", "extraVolumes", "extraVolumeMounts"))
    maps = dict.fromkeys(("image", "annotations", "extraPodSpec", "extraContainerSpec"))
    values = {
        "env": None, "envFrom": None, "podSecurityContext": None, "containerSecurityContext": None,
        "nodeDefaults": {**lists, **maps, "updateStrategy": None}, "router": {**lists, **maps, "strategy": None},
        "model": dict.fromkeys(("id", "volume", "subPath", "readOnly")),
    }  # fmt: skip
    for part in found_pods(PARTS | values).values():
        assert part.spec["securityContext"] == {}
    assert "securityContext" not in found_pods({"router": {"extraPodSpec": {"securityContext": None}}})["router"].spec
    assert render({"commonLabels": None, "nodeDefaults": dict.fromkeys(("args", "resources", "affinity"))} | PARTS)
    with pytest.raises(helm_python.HelmError, match=r"router.serviceAccount: it is missing. Either it is null"):
        render({"router": {"serviceAccount": None}})
    for where, name in (("router", "ingress"), ("nodeDefaults", "gpus"), ("nodeDefaults", "startDeadlineSeconds")):
        with pytest.raises(helm_python.HelmError, match=f"missing property '{name}'"):
            render({where: {name: None}})


def test_the_pages_examples_render() -> None:
    text = (ROOT / "docs" / "kubernetes_pods.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        for part in pods(render(yaml.safe_load(block))):
            assert restricted(part.spec) == []
    for cell in re.findall(r"`model\.volume: (\{.*?\})`", text):
        assert render({"model": {"volume": yaml.safe_load(cell)}})


INIT = {"name": "get", "image": "x"}
LOCKS = {"rdma": {"enabled": True, "rootWithIpcLock": True}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"id": "s3://b/m"}},
     "model.id: nodes read directories and hub ids, not s3://; fetch it by nodeDefaults.initContainers or mount it by"),
    ({"model": {"id": "gs://b/m"}}, "not gs://; fetch it by nodeDefaults.initContainers"),
    ({"model": {"id": "hf://Qwen/Qwen3-8B"}}, "not hf://; write the hub id without hf://"),
    ({"model": {"id": "oci://r/m:1"}}, "not oci://; mount the image: model.volume"),
    ({"model": {"id": "PVC://weights/m"}}, "not pvc://; name the claim in model.existingClaim"),
    ({"model": {"existingClaim": "a", "claim": {"create": True}}},
     "model: existingClaim and claim.create exclude each other"),
    ({"model": {"existingClaim": "a", "volume": {"nfs": {}}}}, "model: existingClaim and volume exclude each other"),
    ({"model": {"claim": {"create": True}, "volume": {"nfs": {}}}}, "model: claim.create and volume exclude each"),
    ({"model": {"subPath": "a"}}, "model.subPath: a new emptyDir has no directories; name the volume in"),
    ({"model": {"id": "/models/a", "readOnly": True}}, "model.readOnly: a new emptyDir is empty, and nodes of role"),
    ({"nodeDefaults": {"extraPodSpec": {"containers": []}}}, "the chart writes this field; use extraContainerSpec"),
    ({"roles": {"decode": {"extraPodSpec": {"volumes": []}}}}, "roles.decode.extraPodSpec.volumes: the chart writes"),
    ({"router": {"extraPodSpec": {"initContainers": [INIT]}}}, "router.extraPodSpec.initContainers: the chart writes"),
    ({"router": {"extraPodSpec": {"serviceAccountName": "a"}}}, "use serviceAccount.name"),
    ({"router": {"extraPodSpec": {"terminationGracePeriodSeconds": 9}}}, "use preStopSeconds and drainSeconds"),
    ({"router": {"extraContainerSpec": {"image": "a"}}}, "router.extraContainerSpec.image: the chart writes this"),
    ({"nodeDefaults": {"extraContainerSpec": {"args": []}}}, "extraContainerSpec.args: the chart writes this field"),
    ({"nodeDefaults": {"extraContainerSpec": {"env": []}}}, "extraContainerSpec.env: the chart writes this field"),
    ({"nodeDefaults": {"extraContainerSpec": {"lifecycle": {"preStop": {"exec": {}}}}}}, "use preStopSeconds"),
    ({"router": {"extraPodSpec": {"hostNetwork": True}}}, "router.extraPodSpec: with hostNetwork its ports are open"),
    ({"nodeDefaults": {"gpus": {"count": 1, "claimTemplate": "g"}, "extraPodSpec": {"resourceClaims": [
        {"name": "gpus"}]}}}, "extraPodSpec: the pod has gpus among its resourceClaims already; choose another"),
    ({"router": {"extraVolumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "secret": {}}]}},
     "router.extraVolumes: the pod has a among its volumes already"),
    ({"nodeDefaults": {"extraVolumeMounts": [{"name": "a", "mountPath": "/models"}]}},
     "extraVolumeMounts: the pod has /models among its volumeMounts already"),
    ({"router": {"serviceAccount": {"create": False}}}, "would go to the namespace's default account"),
    ({"router": {"serviceAccount": {"create": False, "name": "a", "annotations": {"b": "c"}}}},
     "router.serviceAccount.annotations: they are for an account that the chart makes"),
    ({"nodeDefaults": {"serviceAccount": {"annotations": {"b": "c"}}}}, "set create, or annotate the account yourself"),
    ({"nodeDefaults": {"serviceAccount": {"name": "demo-pd-cluster-router"}}}, "the router's account, which may list"),
    ({"roles": {"decode": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"partition": 1}}}}},
     "roles.decode.updateStrategy: rollingUpdate is for type RollingUpdate"),
    ({"router": {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}}}, "with Recreate leave it out"),
    ({"podSecurityContext": {"runAsUser": 0}}, "has runAsUser 0 and runAsNonRoot true, and would never start"),
    ({"containerSecurityContext": {"runAsUser": 0}}, "has runAsUser 0 and runAsNonRoot true"),
    ({"nodeDefaults": {"initContainers": [INIT | {"securityContext": {"runAsUser": 0}}]}}, "container get has runAsU"),
    ({"router": {"extraContainerSpec": {"securityContext": {"privileged": True}}}}, "is privileged with allowPrivi"),
    ({"podSecurityContext": {"fsGroup": None}}, "podSecurityContext.fsGroup: without one, group 10001 cannot read"),
    ({"nodeDefaults": LOCKS | {"extraPodSpec": {"hostUsers": False}}}, "hostUsers false the capability does not lift"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[f"{i} {row[1][:40]}" for i, row in enumerate(REFUSED)])
def test_contradictions_are_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert sentence in str(refused.value)


def test_root_for_locked_memory_is_added_to_any_context() -> None:
    own = {"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}, "runAsUser": 2000}
    parts = found_pods({"containerSecurityContext": own, "nodeDefaults": LOCKS, "preflight": {"enabled": True}})
    for name in ("decode", "preflight-decode"):
        context = parts[name].serving[0]["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE", "IPC_LOCK"]}
        assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
        assert context["readOnlyRootFilesystem"] is True
    assert parts["router"].serving[0]["securityContext"]["runAsUser"] == 2000


def test_the_invariant_of_hardening_finds_an_init_container() -> None:
    objects = changed(render({"nodeDefaults": {"initContainers": [INIT]}}))
    assert invariants.hardening(objects) == []
    one(objects, "StatefulSet", "-decode")["spec"]["template"]["spec"]["initContainers"][0]["securityContext"].update(
        readOnlyRootFilesystem=False
    )
    assert "may do too much" in invariants.hardening(objects)[0]
