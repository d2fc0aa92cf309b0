"""What must hold between the chart's objects, which no schema says. Each function returns what is wrong, in words."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from tests.deploy.chart import Object, PodPart, flag_of, of_kind, pods, title

if TYPE_CHECKING:
    from collections.abc import Iterator

_SUFFIXES = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
}  # fmt: skip
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def quantity(text: object) -> Decimal:
    """A Kubernetes quantity as a number. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2]]


def names(objects: list[Object]) -> list[str]:
    """No two objects of a kind share a name, and every name is one that DNS takes, with room for what pods append."""
    seen = Counter(title(found) for found in objects)
    wrong = [f"{name} is there {count} times" for name, count in seen.items() if count > 1]
    for found in objects:
        name, longest = found["metadata"]["name"], 52 if found["kind"] == "StatefulSet" else 60
        if not _NAME.fullmatch(name) or len(name) > longest:
            wrong.append(f"{title(found)}: not a name")
    return wrong


def selectors(objects: list[Object]) -> list[str]:
    """Every selector finds pods, a workload's own template first of all, and no workload finds another's."""
    parts, wrong = list(pods(objects)), []
    for found in of_kind(objects, "Deployment", "StatefulSet"):
        wanted = found["spec"]["selector"]["matchLabels"]
        chosen = [part.owner for part in parts if _matches(wanted, part)]
        if chosen != [title(found)]:
            wrong.append(f"{title(found)} selects {chosen}")
    for where, wanted in _selectors(objects):
        if not any(_matches(wanted, part) for part in parts):
            wrong.append(f"{where} selects no pod: {wanted}")
    services = {found["metadata"]["name"]: found for found in of_kind(objects, "Service")}
    for found in of_kind(objects, "StatefulSet"):
        service = services.get(found["spec"]["serviceName"])
        if service is None or service["spec"].get("clusterIP") != "None":
            wrong.append(f"{title(found)}: serviceName is no headless Service")
        elif service["spec"]["selector"] != found["spec"]["selector"]["matchLabels"]:
            wrong.append(f"{title(found)}: its Service selects other pods")
    return wrong


def _selectors(objects: list[Object]) -> Iterator[tuple[str, dict[str, str]]]:
    for found in objects:
        spec, where = found.get("spec", {}), title(found)
        match found["kind"]:
            case "Service":
                yield where, spec["selector"]
            case "PodDisruptionBudget" | "PodMonitor":
                yield where, spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield where, spec["podSelector"]["matchLabels"]
                for rule in spec["ingress"]:
                    for peer in rule.get("from", []):
                        if "podSelector" in peer and "namespaceSelector" not in peer:
                            yield f"{where} ingress", peer["podSelector"]["matchLabels"]
            case "Deployment" | "StatefulSet":
                for spread in spec["template"]["spec"].get("topologySpreadConstraints", []):
                    yield f"{where} spread", spread["labelSelector"]["matchLabels"]


def _matches(wanted: dict[str, str], part: PodPart) -> bool:
    return wanted.items() <= part.labels.items()


def _part(part: PodPart) -> str:
    """node, router, pool or balance; "" for pods that serve nothing."""
    return part.labels.get("pd-cluster/part", "")


def ports(objects: list[Object]) -> list[str]:
    """Ports are named, and the target has a port of that name, where its process listens."""
    wrong, parts = [], list(pods(objects))
    for found in of_kind(objects, "Service"):
        for part in (part for part in parts if _matches(found["spec"]["selector"], part)):
            wrong += [
                f"{title(found)}: {part.owner} has no port {port.get('targetPort')!r}"
                for port in found["spec"]["ports"]
                if port.get("targetPort") not in part.port_names
            ]
    for part in parts:
        wrong += _container_ports(part)
    for found in of_kind(objects, "NetworkPolicy"):
        chosen = [part for part in parts if _matches(found["spec"]["podSelector"]["matchLabels"], part)]
        for port in (port for rule in found["spec"]["ingress"] for port in rule.get("ports", [])):
            wrong += [
                f"{title(found)}: {part.owner} has no port {port['port']!r}"
                for part in chosen
                if not _listens(part, port)
            ]
    return [*wrong, *_ports_from_outside(objects, parts)]


def _listens(part: PodPart, port: dict[str, Any]) -> bool:
    """Whether a policy's port is one of the pod's: by name, or the range of its KV ports."""
    if "endPort" not in port:
        return port["port"] in part.port_names
    return f"{port['port']}-{port['endPort']}" in [flag_of(container, "kv-ports") for container in part.serving]


def node_network(objects: list[Object]) -> list[str]:
    """Nodes hear nodes on their own ports only, and everything else on their HTTP port only."""
    wrong = []
    policies = of_kind(objects, "NetworkPolicy")
    for part in (part for part in pods(objects) if _part(part) == "node"):
        mine = [found for found in policies if _matches(found["spec"]["podSelector"]["matchLabels"], part)]
        if not mine:
            wrong.append(f"{part.owner}: no NetworkPolicy")
        if part.spec.get("hostNetwork"):
            wrong.append(f"{part.owner}: NetworkPolicy does not apply to hostNetwork")
        for rule in (rule for found in mine for rule in found["spec"]["ingress"]):
            peers = {peer.get("podSelector", {}).get("matchLabels", {}).get("pd-cluster/part") for peer in rule["from"]}
            ports = ["kv" if "endPort" in port else port["port"] for port in rule.get("ports", [])]
            mine_only = {name for name in part.port_names if peers == {"node"} or name.startswith("http")}
            if set(ports) != mine_only | ({"kv"} if peers == {"node"} else set()):
                wrong.append(f"{part.owner}: {sorted(map(str, peers))} may reach {ports or 'all ports'}")
    return wrong


def _container_ports(part: PodPart) -> Iterator[str]:
    for container in part.containers:
        declared = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {})
            if asked and (asked.get("httpGet") or asked["tcpSocket"])["port"] not in declared:
                yield f"{part.owner}: {probe} asks a port that has no name"
        for flag, name in (("port", "http"), ("port", "pool"), ("control-port", "control")):
            if name in declared and str(declared[name]) != flag_of(container, flag):
                yield f"{part.owner}: port {name} is declared as {declared[name]}, the process has another"


def _ports_from_outside(objects: list[Object], parts: list[PodPart]) -> Iterator[str]:
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}
    for found in of_kind(objects, "Ingress"):
        for path in (path for rule in found["spec"]["rules"] for path in rule["http"]["paths"]):
            backend = path["backend"]["service"]
            service = services.get(backend["name"], {"ports": []})
            if backend["port"]["name"] not in [port["name"] for port in service["ports"]]:
                yield f"{title(found)}: no such Service or port: {backend}"
    for found in of_kind(objects, "HTTPRoute"):
        for backend in (backend for rule in found["spec"]["rules"] for backend in rule["backendRefs"]):
            if "kind" in backend:
                if f"{backend['kind']}/{backend['name']}" not in map(title, objects):
                    yield f"{title(found)}: no such backend: {backend}"
                continue
            service = services.get(backend["name"], {"ports": []})
            if backend["port"] not in [port["port"] for port in service["ports"]]:
                yield f"{title(found)}: no such Service or port: {backend}"
    for found in of_kind(objects, "PodMonitor"):
        chosen = [part for part in parts if _matches(found["spec"]["selector"]["matchLabels"], part)]
        for endpoint in found["spec"]["podMetricsEndpoints"]:
            if any(endpoint["port"] not in part.port_names for part in chosen):
                yield f"{title(found)}: pods without a port {endpoint['port']!r}"
    for found in of_kind(objects, "ServiceMonitor"):
        wanted = found["spec"]["selector"]["matchLabels"]
        chosen_services = [
            service
            for service in of_kind(objects, "Service")
            if wanted.items() <= service["metadata"]["labels"].items()
        ]
        for endpoint in found["spec"]["endpoints"]:
            offered = [port["name"] for service in chosen_services for port in service["spec"]["ports"]]
            if endpoint["port"] not in offered:
                yield f"{title(found)}: no selected Service has a port {endpoint['port']!r}"


def resources(objects: list[Object]) -> list[str]:
    """Every container asks for cpu and memory, limits memory, and asks for no more than its limit."""
    wrong = []
    for part in pods(objects):
        for container in part.containers:
            requests, limits = (container["resources"].get(side, {}) for side in ("requests", "limits"))
            where = f"{part.owner} {container['name']}"
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                wrong.append(f"{where}: no request or limit")
            wrong += [
                f"{where}: {name} {requests[name]} is above the limit {limits[name]}"
                for name in requests.keys() & limits.keys()
                if quantity(requests[name]) > quantity(limits[name])
            ]
    return wrong


def volumes(objects: list[Object], outside: frozenset[str] = frozenset()) -> list[str]:
    """Mounts have volumes, volumes are mounted, and what they name is in the release or in `outside`."""
    wrong = []
    there = {title(found) for found in objects} | outside
    for part in pods(objects):
        declared = {volume["name"]: volume for volume in part.spec.get("volumes", [])}
        mounted = {mount["name"] for container in part.containers for mount in container.get("volumeMounts", [])}
        wrong += [f"{part.owner}: no volume {name}" for name in sorted(mounted - declared.keys())]
        wrong += [f"{part.owner}: volume {name} is mounted nowhere" for name in sorted(declared.keys() - mounted)]
        wrong += [
            f"{part.owner}: {needed} is not there"
            for volume in declared.values()
            for needed in _needed(volume)
            if needed not in there
        ]
    return wrong


def _needed(volume: dict[str, Any]) -> Iterator[str]:
    if "secret" in volume:
        yield f"Secret/{volume['secret']['secretName']}"
    if "configMap" in volume:
        yield f"ConfigMap/{volume['configMap']['name']}"
    if "persistentVolumeClaim" in volume:
        yield f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}"


def autoscalers(objects: list[Object]) -> list[str]:
    """min <= max, the target exists, leaves `replicas` to the autoscaler, and asks for what a share is taken of."""
    wrong = []
    workloads = {title(found): found for found in of_kind(objects, "Deployment", "StatefulSet")}
    for found in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        spec = found["spec"]
        word = "Replicas" if found["kind"] == "HorizontalPodAutoscaler" else "ReplicaCount"
        least, most = spec[f"min{word}"], spec[f"max{word}"]
        fewest = 0 if found["kind"] == "ScaledObject" else 1
        if not fewest <= least <= most:
            wrong.append(f"{title(found)}: {least} to {most} replicas")
        target = workloads.get(f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}")
        if target is None:
            wrong.append(f"{title(found)}: its target is not there")
            continue
        if "replicas" in target["spec"]:
            wrong.append(f"{title(target)}: sets replicas, and so does its autoscaler")
        for metric in (metric["resource"] for metric in spec.get("metrics", []) if metric["type"] == "Resource"):
            wrong += [
                f"{title(found)}: {container['name']} asks for no {metric['name']}"
                for container in target["spec"]["template"]["spec"]["containers"]
                if metric["name"] not in container["resources"].get("requests", {})
            ]
    return wrong


def inference_pools(objects: list[Object]) -> list[str]:
    """A pool has the nodes' HTTP ports and a picker behind its Service, which not everything may reach."""
    wrong = []
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}
    for found in of_kind(objects, "InferencePool"):
        spec, parts = found["spec"], list(pods(objects))
        chosen = [part for part in parts if _matches(spec["selector"]["matchLabels"], part)]
        http = {
            port["containerPort"]
            for part in chosen
            for container in part.containers
            for port in container.get("ports", [])
            if port["name"].startswith("http")
        }
        if not chosen or {_part(part) for part in chosen} != {"node"}:
            wrong.append(f"{title(found)} selects {[part.owner for part in chosen]}")
        if {port["number"] for port in spec["targetPorts"]} != http:
            wrong.append(f"{title(found)}: the nodes' HTTP ports are {http}")
        picker = spec["endpointPickerRef"]
        service = services.get(picker["name"], {"ports": []})
        if ("grpc", picker["port"]["number"]) not in [(port["name"], port["port"]) for port in service["ports"]]:
            wrong.append(f"{title(found)}: no Service has its picker's port")
        elif not any(_serves_grpc(part, picker) for part in parts if _matches(service["selector"], part)):
            wrong.append(f"{title(found)}: no pod picks endpoints")
        rules = [rule for policy in of_kind(objects, "NetworkPolicy") for rule in policy["spec"]["ingress"]]
        open_ports = [port["port"] for rule in rules if not rule.get("from") for port in rule.get("ports", [])]
        if "grpc" in open_ports:
            wrong.append(f"{title(found)}: everything reaches its picker")
    return wrong


def _serves_grpc(part: PodPart, picker: dict[str, Any]) -> bool:
    [container] = part.serving
    return container["args"][0] == "epp" and flag_of(container, "grpc-port") == str(picker["port"]["number"])


def grace(objects: list[Object]) -> list[str]:
    """A stopping pod has time for its preStop and its whole drain before it is killed. Pool, balance have neither."""
    wrong = []
    for part in pods(of_kind(objects, "Deployment", "StatefulSet")):
        if _part(part) in ("pool", "balance"):
            continue
        needed = max(
            float(container["lifecycle"]["preStop"]["exec"]["command"][1]) + float(flag_of(container, "drain-s"))
            for container in part.spec["containers"]
        )
        if part.spec["terminationGracePeriodSeconds"] <= needed:
            wrong.append(
                f"{part.owner}: needs {needed:g} s, is killed after {part.spec['terminationGracePeriodSeconds']}"
            )
    return wrong


def probes(objects: list[Object]) -> list[str]:
    """Three probes with time to answer; starting may take as long as the node's own deadline allows.

    A balance serves nothing: routers tell when it was heard last.
    """
    wrong = []
    for part in pods(of_kind(objects, "Deployment", "StatefulSet")):
        if _part(part) == "balance":
            continue
        for container in part.spec["containers"]:
            wrong += [
                f"{part.owner}: {name} is missing or impatient"
                for name in ("startupProbe", "readinessProbe", "livenessProbe")
                if container.get(name, {}).get("timeoutSeconds", 0) < 5
            ]
            if "--start-deadline-s" in " ".join(container["args"]) and "startupProbe" in container:
                patience = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
                if patience <= float(flag_of(container, "start-deadline-s")):
                    wrong.append(f"{part.owner}: restarted while it may still be starting")
    return wrong


def hardening(objects: list[Object]) -> list[str]:
    """Read-only root, no privilege, no capability but IPC_LOCK, no root but for it, no token but the router's."""
    wrong = []
    for part in pods(objects):
        if part.spec.get("automountServiceAccountToken") is not False and _part(part) != "router":
            wrong.append(f"{part.owner}: has a service account's token")
        if not part.spec["securityContext"].get("runAsNonRoot") or "seccompProfile" not in part.spec["securityContext"]:
            wrong.append(f"{part.owner}: no securityContext")
        for container in part.containers:
            context = container["securityContext"]
            added = context["capabilities"].get("add", [])
            if (
                context["allowPrivilegeEscalation"]
                or not context["readOnlyRootFilesystem"]
                or context.get("privileged")
            ):
                wrong.append(f"{part.owner} {container['name']}: may do too much")
            if context["capabilities"]["drop"] != ["ALL"] or added not in ([], ["IPC_LOCK"]):
                wrong.append(f"{part.owner} {container['name']}: has capabilities")
            if context.get("runAsUser") == 0 and added != ["IPC_LOCK"]:
                wrong.append(f"{part.owner} {container['name']}: is root")
    return wrong


def router_knows_nodes(objects: list[Object]) -> list[str]:
    """What the router looks for is what the node workloads make, and it may look."""
    [router] = [part for part in pods(objects) if _part(part) == "router"]
    [container] = router.serving
    wanted = dict(pair.split("=") for pair in flag_of(container, "kubernetes-selector").split(","))
    wrong = []
    for part in pods(objects):
        is_node, found = part.owner.startswith("StatefulSet/"), _matches(wanted, part)
        if is_node is not found:
            wrong.append(f"{part.owner}: {'not found by' if is_node else 'a node for'} the router")
        if is_node:
            made = [(node["args"][0], port["name"]) for node in part.serving for port in node["ports"]]
            if [role for role, name in made if name == "http"] != [part.labels.get("pd-cluster/role")]:
                wrong.append(f"{part.owner}: no port named http, or its role label is not its role")
            if [role for role, name in made if name == "http-decode"] not in ([], ["decode"]):
                wrong.append(f"{part.owner}: what is no decode node has a port named http-decode")
    if router.spec.get("automountServiceAccountToken") is not True:
        wrong.append("the router has no token to read pods with")
    account = router.spec["serviceAccountName"]
    bound = {
        binding["roleRef"]["name"]
        for binding in of_kind(objects, "RoleBinding")
        if account in [subject["name"] for subject in binding["subjects"]]
    }
    rules = [rule for role in of_kind(objects, "Role") if role["metadata"]["name"] in bound for rule in role["rules"]]
    if not any("pods" in rule["resources"] and {"list", "watch"} <= set(rule["verbs"]) for rule in rules):
        wrong.append("the router may not read pods")
    return wrong


def nodes_know_pool(objects: list[Object]) -> list[str]:
    """Nodes share the release's pool if there is one, only they reach it, and it has memory for what it may hold."""
    wrong = []
    pools = [part for part in pods(objects) if _part(part) == "pool"]
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}
    for part in (part for part in pods(objects) if _part(part) == "node"):
        node = part.serving[0]
        if (flag_of(node, "connector") == "lmcache") is not bool(pools):
            wrong.append(f"{part.owner}: connector {flag_of(node, 'connector')}, and {len(pools)} pools")
        elif pools:
            host, _, port = flag_of(node, "pool-url").removeprefix("lm://").partition(":")
            service = services.get(host, {"selector": {"": ""}, "ports": []})
            if not all(_matches(service["selector"], pool) for pool in pools):
                wrong.append(f"{part.owner}: {host} is no Service of the pool")
            elif port not in [str(offered["port"]) for offered in service["ports"]]:
                wrong.append(f"{part.owner}: the pool does not listen on {port}")
    for pool in pools:
        [server] = pool.serving
        if quantity(server["resources"]["limits"]["memory"]) < Decimal(flag_of(server, "max-gb")) * 10**9 * 6 / 5:
            wrong.append(f"{pool.owner}: killed before it is full")
        peers = [
            peer["podSelector"]["matchLabels"].get("pd-cluster/part")
            for found in of_kind(objects, "NetworkPolicy")
            if _matches(found["spec"]["podSelector"]["matchLabels"], pool)
            for rule in found["spec"]["ingress"]
            for peer in rule.get("from", [{"podSelector": {"matchLabels": {}}}])
        ]
        if peers != ["node"]:
            wrong.append(f"{pool.owner}: reached by {peers}")
    return wrong
