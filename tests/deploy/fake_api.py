"""As much of a Kubernetes API server as Helm's `lookup` of Secrets and workloads needs."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import helm_python
import yaml

from tests.deploy.chart import NAMESPACE, RELEASE, Object, load_chart, objects_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = {"v1": ["Secret"], "apps/v1": ["Deployment", "StatefulSet"]}


def _discovery() -> dict[str, dict[str, Any]]:
    """What the server says of its kinds, and an empty list of each, by path."""
    answers: dict[str, dict[str, Any]] = {}
    for version, kinds in _KINDS.items():
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        names = {kind: f"{kind.lower()}s" for kind in kinds}
        resources = [
            {"name": names[kind], "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
            for kind in kinds
        ]
        listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        answers[root] = listed
        for kind in kinds:
            empty = {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": []}
            answers[f"{root}/namespaces/{NAMESPACE}/{names[kind]}"] = empty
    return answers


def workload(kind: str, name: str, replicas: int) -> tuple[str, Object]:
    """The path and the object of a running Deployment or StatefulSet."""
    found = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": {"replicas": replicas}}
    return f"/apis/apps/v1/namespaces/{NAMESPACE}/{kind.lower()}s/{name}", found


def render_in_cluster(url: str, values: dict[str, Any] | None = None) -> list[Object]:
    """What `helm upgrade` would apply, `lookup` reading from the API server at `url`."""
    kubeconfig = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
    }  # fmt: skip
    content = yaml.safe_dump(kubeconfig)
    with helm_python.Config(kubeconfig_content=content, namespace=NAMESPACE) as cluster, load_chart() as chart:
        return objects_of(cluster.render(chart, values, name=RELEASE, namespace=NAMESPACE, is_upgrade=True))


@contextlib.contextmanager
def api_server(objects: dict[str, dict[str, Any]], asked: list[str]) -> Iterator[str]:
    """Serves `objects` by path, on a port that the OS chose. Yields its URL; puts paths that were read into `asked`."""
    known = _discovery()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            body = (known | objects).get(path)
            status = 200 if body is not None else 404
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            payload = json.dumps(body if body is not None else missing).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="fake api server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
