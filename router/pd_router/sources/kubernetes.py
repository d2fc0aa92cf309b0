"""Nodes from the Kubernetes API: the pods of one namespace with certain labels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig
from lightkube.exceptions import ConfigError
from lightkube.resources.core_v1 import Pod

from pd_http.errors import StartupError
from pd_router.sources.base import make_spec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping

    from lightkube.config.kubeconfig import SingleConfig
    from lightkube.operators import Operator

    from pd_router.node_table import NodeSpec

log = logging.getLogger("pd_router")
ROLE_LABEL = "pd-cluster/role"
SCHEME_LABEL = "pd-cluster/scheme"  # of the pod's nodes: http, which is the default, or https
PORT_NAME = "http"
DECODE_PORT_NAME = "http-decode"
RELIST_S = 60.0  # a watch may end silently, so everything is listed again at least this often
RETRY_S = 0.25  # after the first failure; doubles up to MAX_RETRY_S until a watch delivers an event
MAX_RETRY_S = 2.0
_FAILURES = (httpx2.HTTPError, httpx2.StreamError, msgspec.MsgspecError, OSError, ConfigError)


class KubernetesPods:
    """Lists, then watches from the version of the list. Any end of the watch (410 too) leads to a new list.

    A node is a ready pod that is not being deleted, with the label `pd-cluster/role` and a port named `http`. Its port
    named `http-decode` is a decode node of the same pod. The label `pd-cluster/scheme: https` says that they have TLS.
    While the API server does not answer, the last pods stay; their /health is still polled.
    """

    name = "kubernetes"

    def __init__(
        self,
        namespace: str,
        labels: Mapping[str, str],
        api: SingleConfig,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        relist_s: float = RELIST_S,
    ) -> None:
        self._namespace = namespace
        self._labels: dict[str, str | Operator[Any] | Iterable[Any] | None] = dict(labels)
        self._api = api
        self._sleep = sleep
        self._relist_s = relist_s
        self._num_failures = 0  # in a row

    async def watch(self) -> AsyncGenerator[tuple[NodeSpec, ...], None]:
        client = AsyncClient(self._api, trust_env=not is_inside(self._api))
        try:
            last: tuple[NodeSpec, ...] | None = None
            while True:
                try:
                    async with contextlib.aclosing(self._list_and_watch(client)) as sets:
                        async for nodes in sets:
                            if nodes != last:  # most changes of a pod do not change the node
                                last = nodes
                                yield nodes
                except _FAILURES as error:
                    delay_s = min(RETRY_S * 2**self._num_failures, MAX_RETRY_S)
                    self._num_failures += 1
                    why = f"{type(error).__name__}: {error}"
                    log.warning("kubernetes, namespace %s: %s; listing again in %.2f s", self._namespace, why, delay_s)
                    await self._sleep(delay_s)
        finally:
            await client.close()

    async def _list_and_watch(self, client: AsyncClient) -> AsyncGenerator[tuple[NodeSpec, ...], None]:
        """Ends when it is time to list again. Raises `_FAILURES`."""
        listing = client.list(Pod, namespace=self._namespace, labels=self._labels)
        nodes = {_name(pod): nodes_of(pod) async for pod in listing}
        yield _found(nodes)
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
                    return
                self._num_failures = 0
                if kind == "DELETED":
                    nodes.pop(_name(pod), None)
                else:
                    nodes[_name(pod)] = nodes_of(pod)
                yield _found(nodes)


def _found(nodes: Mapping[str, tuple[NodeSpec, ...]]) -> tuple[NodeSpec, ...]:
    """Sorted by name, so that lists and watches yield equal sets."""
    return tuple(node for _, found in sorted(nodes.items()) for node in found)


def _name(pod: Pod) -> str:
    name = pod.metadata.name if pod.metadata is not None else None
    assert name is not None, "the API server names every pod"
    return name


def nodes_of(pod: Pod) -> tuple[NodeSpec, ...]:
    """() for a pod that must get no requests: not ready, being deleted, or not a node."""
    status, spec, metadata = pod.status, pod.spec, pod.metadata
    if status is None or spec is None or metadata is None:
        return ()
    if metadata.deletionTimestamp is not None or not status.podIP:
        return ()
    if not any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ()):
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
        return first, *(
            make_spec(f"{scheme}://{host}:{number}", "decode", f"{_name(pod)}-decode") for number in further
        )
    except ValueError as error:
        log.warning("pod %s is not a node: %s", metadata.name, error)
        return ()


def is_inside(api: SingleConfig) -> bool:
    """Whether this is the API server of the pod's own cluster, which no proxy outside can reach."""
    given = os.environ.get("KUBERNETES_SERVICE_HOST", "").strip("[]").lower()
    host = urlsplit(api.cluster.server).hostname or ""
    return bool(given) and (host == given or host.startswith("kubernetes.default"))


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
