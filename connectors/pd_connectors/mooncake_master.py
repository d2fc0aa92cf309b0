"""Mooncake's master as a child of this process: it ends with it, however that ends.

The master keeps no block, only where each is; so it needs no bound. It takes no port 0 (that means 50051 to it).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pd_connectors.bundled import BundledLibraries
from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_PORT = 50051
READY_DEADLINE_S = 30.0
END_DEADLINE_S = 10.0  # of a killed master
POLL_S = 0.02
PORT_ATTEMPTS = 5  # with a port of the OS's choice, which another process may take before the master does
# PR_SET_PDEATHSIG outlives exec; a parent that died before it was set is noticed by its id
_EXEC = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def serve(host: str, port: int, on_ready: Callable[[str, int], None]) -> int:
    """Run a master until it ends. Returns its exit status. `port` 0: the OS chooses. `on_ready` gets the address.

    Raises ConnectorUnavailable when Mooncake is not installed, OSError when the master does not start.
    """
    for attempt in range(PORT_ATTEMPTS):
        chosen = port or free_port(host)
        try:
            process = start_master(host, chosen)
            break
        except OSError:
            if port or attempt == PORT_ATTEMPTS - 1:
                raise
    try:
        on_ready(host, chosen)
        return process.wait()
    finally:
        process.kill()
        process.wait(END_DEADLINE_S)


def start_master(host: str, port: int, *flags: str) -> subprocess.Popen[bytes]:
    """A master that listens. It is killed when the calling thread ends, however it does. Raises as `serve` does."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ConnectorUnavailable("the pool needs Mooncake Store: pip install 'pd-cluster[mooncake]'")
    binary = str(Path(spec.origin).parent / "mooncake_master")
    free_port(host, port)  # the master would start beside another listener, and get no connection
    own = (f"--rpc_address={host}", f"--rpc_port={port}", "--metrics_host=127.0.0.1", "--metrics_port=0",
           "--enable_metric_reporting=false")  # fmt: skip
    with BundledLibraries() as libraries:
        environment = {"GLOG_minloglevel": "1", **os.environ, **libraries.environment()}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _EXEC, str(os.getpid()), binary, *own, *flags],
            stdin=subprocess.DEVNULL, env=environment, pass_fds=libraries.fds,
        )  # fmt: skip
    try:
        _wait_listening(process, host, port)
    except BaseException:
        process.kill()
        process.wait(END_DEADLINE_S)
        raise
    return process


def free_port(host: str, port: int = 0) -> int:
    """`port` if it is free; 0: any free port. Raises OSError when it is taken."""
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        chosen: int = listener.getsockname()[1]
        return chosen


def _wait_listening(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    end_s = time.monotonic() + READY_DEADLINE_S
    address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
    while True:
        if process.poll() is not None:
            raise OSError(f"mooncake_master ended with status {process.returncode}")
        try:
            socket.create_connection(address, READY_DEADLINE_S).close()
            return
        except OSError as error:
            if time.monotonic() >= end_s:
                raise OSError(f"mooncake_master does not listen after {READY_DEADLINE_S:g} s") from error
            time.sleep(POLL_S)
