"""Nodes from the Kubernetes API: the pods of one namespace with certain labels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig
from lightkube.exceptions import ConfigError
from lightkube.resources.core_v1 import Pod

from pd_http.errors import StartupError
from pd_router.sources.base import NamedNode, Roster, is_logged, make_spec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
    from ipaddress import IPv4Address, IPv6Address

    from lightkube.config.kubeconfig import SingleConfig
    from lightkube.operators import Operator

log = logging.getLogger("pd_router")
ROLE_LABEL = "pd-cluster/role"
SCHEME_LABEL = "pd-cluster/scheme"  # of the pod's nodes: http, which is the default, or https
PORT_NAME = "http"
DECODE_PORT_NAME = "http-decode"
FINAL_PHASES = ("Succeeded", "Failed")
RELIST_S = 60.0  # a watch may end silently, so everything is listed again at least this often
LIST_S = 20.0  # for all pages of a list
RETRY_S = 0.25  # after the first failure; doubles up to MAX_RETRY_S until a watch delivers an event, or lasts
MAX_RETRY_S = 2.0
_FAILURES = (httpx2.HTTPError, httpx2.StreamError, msgspec.MsgspecError, OSError, ConfigError)


class KubernetesPods:
    """Lists, then watches from the version of the list. Any end of the watch (410 too) leads to a new list.

    A node is a pod with the label `pd-cluster/role` and a port named `http`, from the moment that it is ready until it
    is to be deleted, has ended, or has another address. Its port named `http-decode` is a decode node of the same pod.
    The label `pd-cluster/scheme: https` says that they have TLS. That it is not ready any more says little: when the
    API server was away for 50 s, the controller-manager marks every pod so until their kubelets correct it.
    """

    name = "kubernetes"

    def __init__(
        self, namespace: str, labels: Mapping[str, str], api: SingleConfig,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, relist_s: float = RELIST_S,
    ) -> None:  # fmt: skip
        self._namespace = namespace
        self._labels: dict[str, str | Operator[Any] | Iterable[Any] | None] = dict(labels)
        self._api = api
        self._sleep = sleep
        self._relist_s = relist_s
        self._num_failures = 0  # in a row
        self._is_quiet = False  # a watch has begun, and nothing was received since
        self._pods: dict[str, tuple[NamedNode, ...]] = {}  # by name, at the last word of the API server

    async def watch(self) -> AsyncGenerator[Roster, None]:
        client = AsyncClient(self._api, trust_env=not is_inside(self._api))
        self._pace_watches(client)
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._list_and_watch(client)) as words:
                        async for reported in words:
                            yield reported
                except _FAILURES as error:
                    delay_s = min(RETRY_S * 2**self._num_failures, MAX_RETRY_S)
                    self._num_failures += 1
                    if is_logged(number := self._num_failures):
                        why = f"{type(error).__name__}: {error}".partition("\n")[0]
                        log.warning("kubernetes, namespace %s: %s (%d in a row)", self._namespace, why, number)
                    await self._sleep(delay_s)
        finally:
            await client.close()

    async def _list_and_watch(self, client: AsyncClient) -> AsyncGenerator[Roster, None]:
        """Ends when it is time to list again. Raises `_FAILURES`."""
        listing = client.list(Pod, namespace=self._namespace, labels=self._labels)
        async with asyncio.timeout(LIST_S):
            pods = {_name(pod): pod async for pod in listing}
        before, self._pods = self._pods, {name: nodes_of(pod) for name, pod in pods.items()}
        self._is_quiet = False
        yield self._least_reported_s(pods.values(), [node for name in pods for node in before.get(name, ())], True)
        events = client.watch(
            Pod, namespace=self._namespace, labels=self._labels, resource_version=listing.resourceVersion
        )
        until_s = asyncio.get_running_loop().time() + self._relist_s
        async with contextlib.aclosing(aiter(events)) as changes:  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout_at(until_s):
                        kind, pod = await anext(changes)
                except (TimeoutError, StopAsyncIteration):
                    self._note_success()
                    return
                self._is_quiet = False
                self._note_success()
                if kind in ("ADDED", "MODIFIED", "DELETED"):  # a bookmark names no pod
                    before_it = self._pods.pop(_name(pod), ())
                    if kind != "DELETED":
                        self._pods[_name(pod)] = nodes_of(pod)
                    yield self._least_reported_s([pod], before_it, False)

    def _pace_watches(self, client: AsyncClient) -> None:
        """Pause after a watch that ended without an event: lightkube begins the next one at once, 709 in a second.

        It has no hook for that, and with a `transport` of one's own httpx ignores the proxies of the environment.
        """
        send: Any = client._client.send

        async def paced(req: httpx2.Request, stream: bool = False) -> Any:
            if stream and self._is_quiet:
                await self._sleep(RETRY_S)
            self._is_quiet = stream
            return await send(req, stream)

        client._client.send = paced  # type: ignore[method-assign]

    def _note_success(self) -> None:
        if self._num_failures:
            log.info("kubernetes, namespace %s: followed again", self._namespace)
        self._num_failures = 0

    def _least_reported_s(self, pods: Iterable[Pod], before: Iterable[NamedNode], is_whole: bool) -> Roster:
        """Sorted by name, so that lists and watches yield equal sets. `pods`: just reported, `before`: as they were."""
        nodes = tuple(node for _, found in sorted(self._pods.items()) for node in found)
        known = {node.key for pod in pods if _is_over(pod) for node in _addressed(pod)} | {node.key for node in before}
        return Roster(nodes, frozenset(known.difference(node.key for node in nodes)), is_whole)


def _name(pod: Pod) -> str:
    name = pod.metadata.name if pod.metadata is not None else None
    assert name is not None, "the API server names every pod"
    return name


def nodes_of(pod: Pod) -> tuple[NamedNode, ...]:
    """The nodes of a pod; () for one that has ended or is being deleted."""
    return () if _is_over(pod) else _addressed(pod)


def _is_over(pod: Pod) -> bool:
    deleted = pod.metadata is not None and pod.metadata.deletionTimestamp is not None
    return deleted or (pod.status is not None and pod.status.phase in FINAL_PHASES)


def _addressed(pod: Pod) -> tuple[NamedNode, ...]:
    """The nodes at the pod's address, whatever has become of it; () for a pod that is not a node."""
    status, spec, metadata = pod.status, pod.spec, pod.metadata
    if status is None or spec is None or metadata is None or not status.podIP:
        return ()
    named = [(port.name, port.containerPort) for box in spec.containers for port in box.ports or ()]
    ports = [number for name, number in named if name == PORT_NAME]
    further = [number for name, number in named if name == DECODE_PORT_NAME]
    labels = metadata.labels or {}
    role, scheme = labels.get(ROLE_LABEL, ""), labels.get(SCHEME_LABEL, "http")
    host = f"[{status.podIP}]" if ":" in status.podIP else status.podIP
    try:
        if len(ports) != 1:
            raise ValueError(f"{len(ports)} ports are named {PORT_NAME!r}, not one")
        first = make_spec(f"{scheme}://{host}:{ports[0]}", role, _name(pod))
        decodes = (make_spec(f"{scheme}://{host}:{number}", "decode", f"{_name(pod)}-decode") for number in further)
        return tuple(NamedNode(one, metadata.uid or "", is_ready(pod)) for one in (first, *decodes))
    except ValueError as error:
        log.warning("pod %s is not a node: %s", metadata.name, error)
        return ()


def is_ready(pod: Pod) -> bool:
    """Whether the pod's kubelet says that it is ready: its containers are, and so are its readiness gates.

    The condition Ready says the same, until the controller-manager sets it to False. That leaves ContainersReady.
    """
    conditions = pod.status.conditions if pod.status is not None else None
    true = {condition.type for condition in conditions or () if condition.status == "True"}
    gates = pod.spec.readinessGates if pod.spec is not None else None
    return "Ready" in true or ("ContainersReady" in true and all(gate.conditionType in true for gate in gates or ()))


def is_inside(api: SingleConfig) -> bool:
    """Whether this is the API server of the pod's own cluster or machine, which no proxy outside can reach."""
    host = _plain(urlsplit(api.cluster.server).hostname or "")
    if host == _plain(os.environ.get("KUBERNETES_SERVICE_HOST", "")):
        return True
    if isinstance(host, str):
        return host in ("localhost", "kubernetes", "kubernetes.default") or host.startswith("kubernetes.default.svc")
    return host.is_loopback


def _plain(host: str) -> IPv4Address | IPv6Address | str:
    """An address, however it is spelled, or a name."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return host.lower().rstrip(".")


def config_from_environment() -> SingleConfig:
    """The settings of the pod's service account, else those of $KUBECONFIG, else those of ~/.kube/config.

    Raises StartupError.
    """
    try:
        config = KubeConfig.from_env().get()
    except (ConfigError, OSError) as error:
        raise StartupError(f"--kubernetes-namespace: cannot reach an API server: {error}") from error
    if config is None or config.user is None:
        raise StartupError("--kubernetes-namespace: cannot reach an API server: the kubeconfig's context names no user")
    return config
