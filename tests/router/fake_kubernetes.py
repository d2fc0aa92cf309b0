"""As much of a fake Kubernetes API server as finding pods needs: list and watch, with versions, and all their troubles.

What happens to pods is taken from Kubernetes' sources: the node lifecycle controller (`MarkPodsNotReady`) sets the
condition Ready of all pods of a silent kubelet to False and leaves ContainersReady and its gates; a kubelet that finds
a container not ready writes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from tests.router.fake_nodes import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from lightkube.config.kubeconfig import SingleConfig

Pod = dict[str, Any]
DELETED_AT = "2030-01-01T00:00:00Z"


class FakeKubernetes:
    """One namespace of pods. A change gets the next version; `compact` forgets the changes so far."""

    def __init__(self, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.pods: dict[str, Pod] = {}
        self.version = 100
        self.oldest = 100  # a watch from before this version is answered with 410
        self.lists = 0
        self.watches: list[int] = []  # from which version each began
        self.failing_with = 0  # this status, to everything
        self.failing_watches_with = 0  # this status, to watches
        self.hangs = False  # it accepts connections and says nothing
        self.lists_nothing = False
        self.closes_watches = False  # each one at once, in good order
        self.num_asked = 0
        self.url = ""
        self._log: list[tuple[int, str, Pod, Pod | None]] = []  # version, event, pod, what it was
        self._changed = asyncio.Condition()
        self._dropped = 0
        self._open: list[web.Request] = []

    def attach(self, runner: web.AppRunner) -> None:
        """The server listens."""
        self._runner, self.port = runner, int(runner.addresses[0][1])
        self.url = f"http://127.0.0.1:{self.port}"

    # --- what happens to pods

    async def put(self, name: str, role: str = "decode", **fields: Any) -> None:
        """Create a pod, or put another in its place; `fields` as in `make_pod`."""
        before = self.pods.get(name)
        pod = make_pod(name, role, **fields)
        await self._note("MODIFIED" if before else "ADDED", pod, before)

    async def delete(self, name: str) -> None:
        """The last word of a pod tells when it was deleted."""
        gone = json.loads(json.dumps(self.pods[name]))
        gone["metadata"]["deletionTimestamp"] = DELETED_AT
        await self._note("DELETED", gone, self.pods[name])

    async def mark_all(self, *, ready: bool, kinds: tuple[str, ...] = ("Ready",)) -> None:
        """The controller-manager finds all kubelets silent, or they correct it."""
        for name in list(self.pods):
            pod = json.loads(json.dumps(self.pods[name]))
            for condition in pod["status"]["conditions"]:
                if condition["type"] in kinds:
                    condition["status"] = str(ready)
            await self._note("MODIFIED", pod, self.pods[name])

    async def _note(self, kind: str, pod: Pod, before: Pod | None) -> None:
        self.version += 1
        pod = json.loads(json.dumps(pod))
        pod["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.pods[pod["metadata"]["name"]]
        else:
            self.pods[pod["metadata"]["name"]] = pod
        self._log.append((self.version, kind, pod, before))
        await self._wake()

    # --- what happens to the server

    def compact(self) -> None:
        self._log.clear()
        self.oldest = self.version

    async def drop(self) -> None:
        """Cut every open watch in the middle of its answer."""
        for request in list(self._open):
            assert request.transport is not None
            request.transport.abort()
        await self.end()

    async def end(self) -> None:
        """End every open watch in good order, as a server does now and then."""
        self._dropped += 1
        await self._wake()

    async def bookmark(self) -> None:
        """Tell the open watches how far they are."""
        self.version += 1
        told = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}}
        self._log.append((self.version, "BOOKMARK", told, None))
        await self._wake()

    async def leave(self) -> None:
        """Nothing listens any more, and what was open is cut."""
        for site in list(self._runner.sites):
            await site.stop()
        await self.drop()

    async def come_back(self) -> None:
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def until_asked(self, count: int) -> None:
        """`count` requests have come since the start, whatever the answers are."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.num_asked >= count)

    async def until_watches(self, count: int) -> None:
        """`count` watches have begun since the start, the last of them is open."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: len(self.watches) >= count and len(self._open) > 0)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- HTTP

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        await self._wake()
        if self.hangs:
            await asyncio.Event().wait()
        if self.failing_with:
            return web.json_response(_status(self.failing_with, "fake trouble"), status=self.failing_with)
        wanted = dict(pair.split("=") for pair in request.query.get("labelSelector", "").split(",") if pair)
        if request.query.get("watch") == "true":
            return await self._watch(request, wanted)
        self.lists += 1
        items = [pod for pod in self.pods.values() if _matches(pod, wanted) and not self.lists_nothing]
        meta = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, wanted: dict[str, str]) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if status := self.failing_watches_with:
            return web.json_response(_status(status, "fake trouble"), status=status)
        if since < self.oldest:
            return web.json_response(_status(410, "too old resource version"), status=410)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        self.watches.append(since)
        if self.closes_watches:
            await self._wake()
            return response
        self._open.append(request)
        dropped = self._dropped
        await self._wake()
        try:
            while dropped == self._dropped:
                if since < self.oldest:
                    await _send(response, "ERROR", _status(410, "too old resource version"))
                    return response
                for version, kind, pod, before in [entry for entry in self._log if entry[0] > since]:
                    since = version
                    if (seen_as := _seen_as(kind, pod, before, wanted)) is not None:
                        await _send(response, seen_as, pod)
                async with self._changed:
                    while since >= self.version and dropped == self._dropped:
                        await self._changed.wait()
        finally:
            self._open.remove(request)
        return response


def _seen_as(kind: str, pod: Pod, before: Pod | None, wanted: dict[str, str]) -> str | None:
    """The event as a watch with a selector sees it: a pod that no longer matches is gone."""
    if kind == "BOOKMARK":
        return kind
    was, matches = before is not None and _matches(before, wanted), _matches(pod, wanted)
    if kind == "DELETED" or not matches:
        return "DELETED" if was else None
    return "MODIFIED" if was else "ADDED"


def _matches(pod: Pod, wanted: dict[str, str]) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return wanted.items() <= labels.items()


async def _send(response: web.StreamResponse, kind: str, thing: dict[str, Any]) -> None:
    await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def make_pod(
    name: str,
    role: str = "decode",
    *,
    ip: str = "127.0.0.1",
    port: int = 1,
    port_name: str = "http",
    ready: bool = True,
    containers_ready: bool | None = None,
    gates: Mapping[str, bool] | None = None,
    terminating: bool = False,
    phase: str = "Running",
    uid: str = "",
    part: str = "node",
    scheme: str = "",
) -> Pod:
    """`containers_ready`: None: as `ready`, as a kubelet tells it. `gates`: the readiness gates, and how they stand."""
    metadata: dict[str, Any] = {
        "name": name, "uid": uid or f"uid-{name}", "labels": {"pd-cluster/part": part, "pd-cluster/role": role},
    }  # fmt: skip
    if scheme:
        metadata["labels"]["pd-cluster/scheme"] = scheme
    if terminating:
        metadata["deletionTimestamp"] = DELETED_AT
    ports = [{"name": port_name, "containerPort": port}, {"name": "kv", "containerPort": 65000}]
    states = {
        "Ready": ready,
        "ContainersReady": ready if containers_ready is None else containers_ready,
        **(gates or {}),
    }
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {
            "containers": [{"name": "node", "ports": ports}, {"name": "sidecar"}],
            "readinessGates": [{"conditionType": kind} for kind in gates or ()],
        },
        "status": {
            "podIP": ip, "phase": phase,
            "conditions": [{"type": kind, "status": str(state)} for kind, state in states.items()],
        },
    }  # fmt: skip


@contextlib.asynccontextmanager
async def kubernetes() -> AsyncIterator[tuple[FakeKubernetes, SingleConfig]]:
    """The server on a port of the OS's choosing, and the way to it."""
    fake = FakeKubernetes()
    app = web.Application()
    app.router.add_get(f"/api/v1/namespaces/{fake.namespace}/pods", fake.serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.attach(runner)
        api = KubeConfig.from_one(cluster=Cluster(server=fake.url), user=User()).get()
        assert api is not None
        yield fake, api
    finally:
        await runner.cleanup()
