"""What clusters admit: Pod Security's level `restricted`, and OpenShift's SCC `restricted-v2`, by their documents."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SCC_ANNOTATION = "openshift.io/required-scc"
PROJECT_UIDS = range(1000680000, 1000690000)


def restricted(spec: dict[str, Any]) -> list[str]:
    """What the level refuses in a pod's spec."""
    pod = spec.get("securityContext", {})
    wrong = [f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    wrong += [f"volume {volume['name']}" for volume in spec.get("volumes", []) if not VOLUMES & volume.keys()]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        own = container.get("securityContext", {})
        wrong += [f"{container['name']}: {text}" for text in _of_container(container, own, pod | own)]
    return wrong


def _of_container(container: dict[str, Any], own: dict[str, Any], all_: dict[str, Any]) -> Iterator[str]:
    capabilities = own.get("capabilities", {})
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "may get privileges"
    if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "has capabilities"
    if all_.get("runAsNonRoot") is not True or all_.get("runAsUser") == 0:
        yield "may be root"
    if all_.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "no seccomp profile"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "has a port of the host"


def admit_to_project(spec: dict[str, Any]) -> dict[str, Any]:
    """The pod as `restricted-v2` admits it to a project: with the project's user and group. Raises ValueError."""
    admitted = copy.deepcopy(spec)
    pod = admitted.setdefault("securityContext", {})
    given = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    wrong = restricted(spec | {"securityContext": given | pod})
    contexts = [pod, *(container.get("securityContext", {}) for container in admitted["containers"])]
    users = {context["runAsUser"] for context in contexts if "runAsUser" in context}
    wrong += [f"user {user} is not of the project" for user in users if user not in PROJECT_UIDS]
    if pod.get("fsGroup", PROJECT_UIDS.start) != PROJECT_UIDS.start:
        wrong.append(f"group {pod['fsGroup']} is not of the project")
    if wrong:
        raise ValueError("; ".join(wrong))
    return admitted | {"securityContext": pod | {"runAsUser": PROJECT_UIDS.start, "fsGroup": PROJECT_UIDS.start}}
