"""The hub, as huggingface_hub asks it for one model: the list of files, and each file by HEAD and GET."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves the files of `directory` as the main revision of `model` ("owner/name"). `asked`: METHOD and path of all
    requests."""

    def __init__(self, model: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        paths = [path for path in directory.rglob("*") if path.is_file()]
        self.files = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """`asked` is the log."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        api, file = f"/api/models/{self.server.model}", f"/{self.server.model}/resolve/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._send(json.dumps({"id": self.server.model, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"{api}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": k, "size": len(v), "oid": _digest(v)} for k, v in self.server.files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif path.startswith(file) and (name := path.removeprefix(file).partition("/")[2]) in self.server.files:
            content = self.server.files[name]
            self._send(content, etag=_digest(content))
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving_hub(model: str, directory: Path) -> Iterator[HubServer]:
    """A hub in a thread, for a `with` statement."""
    with HubServer(model, directory) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
