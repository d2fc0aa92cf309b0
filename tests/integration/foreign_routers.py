"""Foreign routers as processes before our nodes, and a recorder that stands between them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import venv
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.system import ANSWER_DEADLINE_S, wait_until
from tests.ports import free_port
from tests.server.foreign_exchanges import OF_PREFILL, PARAMS, TICKET
from tests.server.sse import parse_events

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.cluster import Launcher

INSTALL_DEADLINE_S = 600.0
VLLM_ROUTER = "vllm-router==0.1.17"
PRODUCTION_STACK = "PRODUCTION_STACK"  # variable: a checkout of vllm-project/production-stack, which no index has
_NOT_KEPT = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "user-agent"})


def vllm_router(directory: Path, launcher: Launcher, prefill: str, decode: str) -> str:
    """Install it, start it before two nodes, and return its URL. Skips the test where it cannot be installed."""
    port, metrics_port = free_port(), free_port()
    command = [
        str(installed(directory, VLLM_ROUTER) / "vllm-router"), "--host=127.0.0.1", f"--port={port}",
        f"--prometheus-port={metrics_port}", "--vllm-pd-disaggregation", "--kv-connector=nixl", "--policy=round_robin",
        "--prefill", prefill, "--decode", decode,
    ]  # fmt: skip
    return started(launcher, "vllm-router", command, port)


def production_stack(directory: Path, launcher: Launcher, prefill: str, decode: str) -> str:
    """As above, for a checkout that the environment names."""
    if not os.environ.get(PRODUCTION_STACK):
        pytest.skip(f"{PRODUCTION_STACK} names no checkout of production-stack")
    sources = Path(os.environ[PRODUCTION_STACK]) / "src"
    programs = installed(directory, "-r", str(sources / "vllm_router" / "requirements.txt"))
    port = free_port()
    command = [
        str(programs / "python"), "-m", "vllm_router.app", "--host=127.0.0.1", f"--port={port}",
        "--service-discovery=static", f"--static-backends={prefill},{decode}",
        "--static-models=demo_model,demo_model", "--static-model-labels=prefill,decode",
        "--prefill-model-labels=prefill", "--decode-model-labels=decode",
        "--routing-logic=disaggregated_prefill_orchestrated",
    ]  # fmt: skip
    return started(launcher, "production-stack", command, port, {"PYTHONPATH": str(sources)})


def installed(directory: Path, *packages: str) -> Path:
    """The folder of the programs of a virtual environment with these packages."""
    venv.create(directory, with_pip=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{packages} cannot be installed here: {error.stderr.strip().splitlines()[-1:]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{packages} cannot be installed here within {INSTALL_DEADLINE_S:g} s")
    return directory / "bin"


def started(
    launcher: Launcher, name: str, command: Sequence[str], port: int, environment: dict[str, str] | None = None
) -> str:
    router, url = launcher.start(name, command, environment), f"http://127.0.0.1:{port}"
    wait_until(lambda: is_healthy(url), lambda: router.output)
    return url


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Recorder:
    """The legs that passed, in the order of their answers."""

    def __init__(self) -> None:
        self._legs: list[dict[str, Any]] = []

    def forget(self) -> None:
        self._legs = []

    def take(self) -> list[dict[str, Any]]:
        """P's leg and D's leg since the last call, without what differs from run to run."""
        legs, self._legs = self._legs, []
        to_p, to_d = legs
        given = to_p["answer"][PARAMS]
        params = to_d["body"][PARAMS]
        to_d["body"][PARAMS] = {k: OF_PREFILL if v == given.get(k, OF_PREFILL) else v for k, v in params.items()}
        given["ticket"] = TICKET
        return legs

    @contextmanager
    def before(self, node: str, url: str) -> Iterator[str]:
        """An address that passes everything on to `url`, and keeps the POSTs. Answers are passed on when whole."""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass_on(None)

            def do_POST(self) -> None:
                self._pass_on(self.rfile.read(int(self.headers["content-length"])))

            def _pass_on(self, body: bytes | None) -> None:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_KEPT}
                # not httpx: it refuses headers that these routers send, such as "Bearer " without a key
                connection = HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_DEADLINE_S)
                with closing(connection):
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    status, kind, content = answer.status, answer.headers.get("content-type", ""), answer.read()
                if body is not None:
                    recorder._keep(node, self.path, headers, body, (status, kind, content))
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def _keep(self, node: str, path: str, headers: dict[str, str], body: bytes, answer: tuple[int, str, bytes]) -> None:
        status, kind, content = answer
        kind = kind.partition(";")[0]
        is_stream = kind == "text/event-stream"
        told = [data for _, data in parse_events(content.decode())] if is_stream else json.loads(content)
        sent = {"node": node, "path": path, "headers": headers, "body": json.loads(body)}
        self._legs.append(sent | {"status": status, "type": kind, "answer": told})
