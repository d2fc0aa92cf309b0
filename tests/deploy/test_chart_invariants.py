"""Each invariant finds the fault that it is there for: seeded into a rendered example, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest

from tests.deploy import invariants
from tests.deploy.chart import Object, changed, example_values, one, render
from tests.deploy.custom_resources import check_custom_resource, check_with_crds
from tests.deploy.test_chart_examples import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Callable


def spec(objects: list[Object], kind: str, name: str) -> Any:
    """The spec of an object, of its pods where it makes some."""
    found = one(objects, kind, name)["spec"]
    return found["template"]["spec"] if "template" in found else found


def container(objects: list[Object], name: str) -> Any:
    return spec(objects, "Deployment" if name in ("router", "pool") else "StatefulSet", name)["containers"][0]


def relabel(objects: list[Object]) -> None:
    one(objects, "StatefulSet", "decode")["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] = "x"


def take_volume(objects: list[Object]) -> None:
    spec(objects, "StatefulSet", "decode")["volumes"].pop()


POOL_URL = "--pool-url=lm://demo-pd-cluster-pool:6500"


def argument(objects: list[Object], name: str, old: str, new: str) -> None:
    given = container(objects, name)["args"]
    given[given.index(old)] = new


FAULTS: list[tuple[str, Callable[[list[Object]], list[str]], Callable[[list[Object]], Any], str]] = [
    ("twice", invariants.names, lambda o: o.append(o[0]), "is there 2 times"),
    ("bad name", invariants.names, lambda o: o[0]["metadata"].update(name="Not_a_name"), "not a name"),
    ("pods lost their label", invariants.selectors, relabel, "StatefulSet/demo-pd-cluster-decode selects []"),
    ("service", invariants.selectors,
     lambda o: spec(o, "Service", "router")["selector"].update(x="y"), "Service/demo-pd-cluster-router selects no pod"),
    ("budget", invariants.selectors,
     lambda o: spec(o, "PodDisruptionBudget", "prefill")["selector"]["matchLabels"].update(x="y"), "selects no pod"),
    ("policy", invariants.selectors,
     lambda o: spec(o, "NetworkPolicy", "nodes")["podSelector"]["matchLabels"].update(x="y"), "selects no pod"),
    ("policy's peer", invariants.selectors,
     lambda o: spec(o, "NetworkPolicy", "nodes")["ingress"][0]["from"][0]["podSelector"]["matchLabels"].update(x="y"),
     "ingress selects no pod"),
    ("monitor", invariants.selectors,
     lambda o: spec(o, "PodMonitor", "nodes")["selector"]["matchLabels"].update(x="y"), "PodMonitor"),
    ("headless", invariants.selectors, lambda o: spec(o, "Service", "decode").pop("clusterIP"), "no headless Service"),
    ("target port", invariants.ports,
     lambda o: spec(o, "Service", "decode")["ports"][0].update(targetPort="web"), "has no port 'web'"),
    ("port without a name", invariants.ports,
     lambda o: spec(o, "Service", "decode")["ports"][0].pop("targetPort"), "has no port None"),
    ("probe", invariants.ports,
     lambda o: container(o, "decode")["livenessProbe"]["httpGet"].update(port=8100), "livenessProbe"),
    ("other port", invariants.ports,
     lambda o: argument(o, "decode", "--control-port=8101", "--control-port=0"), "declared as 8101"),
    ("policy port", invariants.ports,
     lambda o: spec(o, "NetworkPolicy", "router")["ingress"][0]["ports"][0].update(port="web"), "has no port 'web'"),
    ("policy's KV ports", invariants.ports,
     lambda o: spec(o, "NetworkPolicy", "nodes")["ingress"][0]["ports"][2].update(port=44000), "has no port 44000"),
    ("node's KV ports", invariants.ports,
     lambda o: argument(o, "decode", "--kv-ports=45000-45099", "--kv-ports=45000-46099"), "has no port 45000"),
    ("KV ports for routers", invariants.node_network,
     lambda o: spec(o, "NetworkPolicy", "nodes")["ingress"][1]["ports"].append({"port": 1, "endPort": 65535}),
     "may reach ['http', 'kv']"),
    ("all ports for nodes", invariants.node_network,
     lambda o: spec(o, "NetworkPolicy", "nodes")["ingress"][0].pop("ports"), "['node'] may reach all ports"),
    ("nodes without a policy", invariants.node_network,
     lambda o: o.remove(one(o, "NetworkPolicy", "nodes")), "no NetworkPolicy"),
    ("nodes on the machine's network", invariants.node_network,
     lambda o: spec(o, "StatefulSet", "decode").update(hostNetwork=True), "does not apply to hostNetwork"),
    ("route port", invariants.ports,
     lambda o: spec(o, "HTTPRoute", "cluster")["rules"][0]["backendRefs"][0].update(port=81), "no such Service"),
    ("monitor port", invariants.ports,
     lambda o: spec(o, "ServiceMonitor", "router")["endpoints"][0].update(port="web"), "no selected Service"),
    ("request above limit", invariants.resources,
     lambda o: container(o, "router")["resources"]["requests"].update(memory="2Gi"), "2Gi is above the limit 1Gi"),
    ("no limit", invariants.resources,
     lambda o: container(o, "router")["resources"].pop("limits"), "no request or limit"),
    ("volume gone", invariants.volumes, take_volume, "no volume tmp"),
    ("volume unused", invariants.volumes, lambda o: container(o, "decode")["volumeMounts"].pop(), "mounted nowhere"),
    ("claim", invariants.volumes,
     lambda o: spec(o, "StatefulSet", "decode")["volumes"][1]["persistentVolumeClaim"].update(claimName="other"),
     "PersistentVolumeClaim/other is not there"),
    ("killed early", invariants.grace,
     lambda o: spec(o, "StatefulSet", "decode").update(terminationGracePeriodSeconds=305), "needs 305 s"),
    ("impatient", invariants.probes,
     lambda o: container(o, "router")["readinessProbe"].update(timeoutSeconds=1), "readinessProbe"),
    ("restarted while starting", invariants.probes,
     lambda o: container(o, "decode")["startupProbe"].update(failureThreshold=3), "may still be starting"),
    ("token", invariants.hardening,
     lambda o: spec(o, "StatefulSet", "decode").pop("automountServiceAccountToken"), "token"),
    ("root", invariants.hardening,
     lambda o: container(o, "router")["securityContext"].update(runAsUser=0), "is root"),
    ("writable", invariants.hardening,
     lambda o: container(o, "router")["securityContext"].update(readOnlyRootFilesystem=False), "may do too much"),
    ("capability", invariants.hardening,
     lambda o: container(o, "decode")["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "has capabilities"),
    ("a node not found", invariants.router_knows_nodes,
     lambda o: one(o, "StatefulSet", "decode")["spec"]["template"]["metadata"]["labels"].pop("pd-cluster/part"),
     "not found by the router"),
    ("another's role", invariants.router_knows_nodes,
     lambda o: one(o, "StatefulSet", "decode")["spec"]["template"]["metadata"]["labels"].update(
         {"pd-cluster/role": "prefill"}), "role label"),
    ("no http port", invariants.router_knows_nodes,
     lambda o: container(o, "decode")["ports"][0].update(name="web"), "no port named http"),
    ("router without token", invariants.router_knows_nodes,
     lambda o: spec(o, "Deployment", "router").update(automountServiceAccountToken=False), "no token"),
    ("role of another", invariants.router_knows_nodes,
     lambda o: one(o, "RoleBinding", "router")["roleRef"].update(name="x"), "may not read pods"),
]  # fmt: skip
POOL_FAULTS: list[tuple[str, Callable[[list[Object]], list[str]], Callable[[list[Object]], Any], str]] = [
    ("an unknown pool", invariants.nodes_know_pool,
     lambda o: argument(o, "decode", "--connector=lmcache", "--connector=nixl"), "connector nixl, and 1 pools"),
    ("another's pool", invariants.nodes_know_pool,
     lambda o: argument(o, "decode", POOL_URL, "--pool-url=lm://elsewhere:6500"), "elsewhere is no Service"),
    ("pool's port", invariants.nodes_know_pool,
     lambda o: argument(o, "decode", POOL_URL, POOL_URL + "1"), "does not listen on 65001"),
    ("pool's memory", invariants.nodes_know_pool,
     lambda o: argument(o, "pool", "--max-gb=128", "--max-gb=160"), "killed before it is full"),
    ("pool for all nodes", invariants.nodes_know_pool,
     lambda o: spec(o, "NetworkPolicy", "pool")["ingress"][0].pop("from"), "reached by [None]"),
    ("pool's probe", invariants.ports,
     lambda o: container(o, "pool")["livenessProbe"]["tcpSocket"].update(port=6500), "livenessProbe"),
    ("pool's declared port", invariants.ports,
     lambda o: argument(o, "pool", "--port=6500", "--port=0"), "declared as 6500"),
    ("pool with a token", invariants.hardening,
     lambda o: spec(o, "Deployment", "pool").pop("automountServiceAccountToken"), "token"),
]  # fmt: skip
GATEWAY_FAULTS: list[tuple[str, Callable[[list[Object]], list[str]], Callable[[list[Object]], Any], str]] = [
    ("all pods", invariants.inference_pools,
     lambda o: spec(o, "InferencePool", "cluster")["selector"]["matchLabels"].pop("pd-cluster/part"), "selects"),
    ("another port", invariants.inference_pools,
     lambda o: spec(o, "InferencePool", "cluster")["targetPorts"][0].update(number=8101), "HTTP ports are"),
    ("no picker", invariants.inference_pools,
     lambda o: spec(o, "InferencePool", "cluster")["endpointPickerRef"].update(name="x"), "no Service"),
    ("a router only", invariants.inference_pools,
     lambda o: argument(o, "router", "epp", "router"), "no pod picks"),
    ("a picker for all", invariants.inference_pools,
     lambda o: spec(o, "NetworkPolicy", "router")["ingress"][1].pop("from"), "everything reaches"),
    ("route to nothing", invariants.ports,
     lambda o: spec(o, "HTTPRoute", "cluster")["rules"][0]["backendRefs"][0].update(name="x"), "no such backend"),
    ("ScaledObject's target", invariants.autoscalers,
     lambda o: spec(o, "ScaledObject", "decode")["scaleTargetRef"].update(name="x"), "its target is not there"),
    ("ScaledObject upside down", invariants.autoscalers,
     lambda o: spec(o, "ScaledObject", "decode").update(minReplicaCount=9), "9 to 8 replicas"),
    ("two masters of KEDA's", invariants.autoscalers,
     lambda o: one(o, "StatefulSet", "decode")["spec"].update(replicas=1), "so does its autoscaler"),
]  # fmt: skip
SCALING_FAULTS: list[tuple[str, Callable[[list[Object]], Any], str]] = [
    ("upside down", lambda o: spec(o, "HorizontalPodAutoscaler", "decode").update(minReplicas=9), "9 to 8 replicas"),
    ("two masters", lambda o: one(o, "StatefulSet", "decode")["spec"].update(replicas=1), "so does its autoscaler"),
    ("no target", lambda o: spec(o, "HorizontalPodAutoscaler", "decode")["scaleTargetRef"].update(name="x"), "target"),
    ("share of nothing", lambda o: container(o, "router")["resources"]["requests"].pop("cpu"), "asks for no cpu"),
]  # fmt: skip


@pytest.fixture(scope="module")
def sound() -> list[Object]:
    return render(example_values("xpyd-rdma"))


@pytest.mark.parametrize(("invariant", "fault", "found"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_fault_is_found(
    sound: list[Object],
    invariant: Callable[[list[Object]], list[str]],
    fault: Callable[[list[Object]], Any],
    found: str,
) -> None:
    objects = changed(sound)
    before = invariant(objects)
    fault(objects)
    new = [text for text in invariant(objects) if text not in before]
    assert any(found in text for text in new), new
    if invariant is not invariants.volumes:  # that one has to be told what users bring
        assert before == []


@pytest.mark.parametrize(
    ("fault", "found"), [row[1:] for row in SCALING_FAULTS], ids=[row[0] for row in SCALING_FAULTS]
)
def test_scaling_fault_is_found(fault: Callable[[list[Object]], Any], found: str) -> None:
    objects = render(example_values("autoscaling"))
    assert invariants.autoscalers(objects) == []
    fault(objects)
    assert any(found in text for text in invariants.autoscalers(objects))


@pytest.mark.parametrize(
    ("invariant", "fault", "found"), [row[1:] for row in POOL_FAULTS], ids=[row[0] for row in POOL_FAULTS]
)
def test_pool_fault_is_found(
    invariant: Callable[[list[Object]], list[str]], fault: Callable[[list[Object]], Any], found: str
) -> None:
    objects = render(example_values("lmcache-pool"))
    assert invariant(objects) == []
    fault(objects)
    assert any(found in text for text in invariant(objects)), invariant(objects)


@pytest.mark.parametrize(
    ("invariant", "fault", "found"), [row[1:] for row in GATEWAY_FAULTS], ids=[row[0] for row in GATEWAY_FAULTS]
)
def test_gateway_fault_is_found(
    invariant: Callable[[list[Object]], list[str]], fault: Callable[[list[Object]], Any], found: str
) -> None:
    objects = render(example_values("inference-pool"))
    assert invariant(objects) == []
    fault(objects)
    assert any(found in text for text in invariant(objects)), invariant(objects)


def test_what_users_bring_is_missed_when_it_is_not_named(sound: list[Object]) -> None:
    assert invariants.volumes(sound, OUTSIDE) == []
    assert any("Secret/pd-cluster-key" in text for text in invariants.volumes(sound))


def test_strict_validation_refuses_an_unknown_field(sound: list[Object]) -> None:
    objects = changed(sound)
    spec(objects, "StatefulSet", "decode")["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(one(objects, "StatefulSet", "decode"), "1.32", strict=True)


def test_custom_resources_refuse_an_unknown_field(sound: list[Object]) -> None:
    objects = changed(sound)
    spec(objects, "PodMonitor", "nodes")["podMetricsEndpoints"][0]["schem"] = "http"
    assert any("schem" in text for text in check_custom_resource(one(objects, "PodMonitor", "nodes")))


def test_a_crd_refuses_an_unknown_field_at_any_depth() -> None:
    inner = {"type": "object", "properties": {"port": {"type": "string"}}}
    schema = {"type": "object", "properties": {
        "apiVersion": {}, "kind": {}, "metadata": {}, "spec": {"type": "array", "items": inner}}}  # fmt: skip
    crd = {"spec": {"group": "g", "names": {"kind": "K"}, "versions": [
        {"name": "v1", "schema": {"openAPIV3Schema": schema}}]}}  # fmt: skip
    found: Object = {"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "x"}, "spec": [{"port": "a"}]}
    assert check_with_crds(found, [crd]) == []
    assert "prot" in check_with_crds({**found, "spec": [{"prot": "a"}]}, [crd])[0]
    assert check_with_crds({**found, "kind": "L"}, [crd]) == ["no CRD for g/v1 L"]


@pytest.mark.parametrize(
    ("small", "large"), [("500m", "1"), ("1023Mi", "1Gi"), ("1", "1k"), ("1G", "1Gi"), ("9", "10")]
)
def test_quantities_are_compared_as_numbers(small: str, large: str) -> None:
    assert invariants.quantity(small) < invariants.quantity(large)
