"""The way into a Ray cluster: token authentication always, by Ray's own means, and checked on the other side."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray.cluster import CONTROLLER, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
HEAD_RESOURCE = "node:__internal_head__"
CONNECT_DEADLINE_S = 10.0
PROBE_DEADLINE_S = 60.0  # a worker process must start for it
LOCAL_STORE_BYTES = 100_000_000  # Ray's object store, which holds nothing of ours


def prepare_environment(environ: MutableMapping[str, str], home: Path, *, joins: bool) -> None:
    """Turn token authentication on, before Ray is imported. `joins`: an existing cluster, whose token must be here.

    Raises StartupError.
    """
    mode = environ.get(MODE, "token")
    if mode.lower() != "token":
        raise StartupError(f"${MODE} is {mode!r}: a cluster on Ray needs token authentication; unset it")
    path = environ.get(TOKEN_PATH)
    if path and not environ.get(TOKEN) and not Path(path).is_file():
        raise StartupError(f"${TOKEN_PATH} names no file: {path}")
    if joins and not (environ.get(TOKEN) or path or (home / ".ray" / "auth_token").is_file()):
        raise StartupError(
            f"joining a Ray cluster needs its token: put it into ~/.ray/auth_token, a file that ${TOKEN_PATH} names, "
            f"or ${TOKEN}. Every machine of the cluster needs {MODE}=token and the same token when `ray start` runs"
        )
    environ[MODE] = "token"
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user has asked for it
    if joins:  # how often a refused driver asks again (the name is history); a Ray that is only starting needs more
        environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")


@contextlib.contextmanager
def connected(name: str, address: str, cpus: float = 0.0) -> Iterator[None]:
    """A connection to the Ray cluster at `address`; "": a Ray on this machine, which ends with the connection.

    `cpus`: what the processes on such a Ray will reserve. Raises StartupError.
    """
    check_address(address)
    prepare_environment(os.environ, Path.home(), joins=bool(address))
    try:
        import ray
    except ImportError as error:
        raise StartupError(f"`pd-cluster ray` needs Ray ({error}): pip install 'pd-cluster[ray]'") from error
    own: dict[str, Any] = {}
    if not address:
        cores = len(os.sched_getaffinity(0))
        own = {
            "include_dashboard": False, "num_cpus": max(cores, math.ceil(2 * cpus)),  # they only count; room to scale
            "object_store_memory": LOCAL_STORE_BYTES,
        }  # fmt: skip
    try:
        ray.init(
            address=address or "local", namespace=namespace_of(name), log_to_driver=False, logging_level="error", **own
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = f"the Ray cluster at {address}" if address else "a Ray on this machine"
        hint = "; is the token that of this cluster?" if address else ""
        raise StartupError(f"cannot reach {where}: {_first_line(error)}{hint}") from error
    try:
        _check_authentication(address)
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raises StartupError when nobody listens there: Ray itself would try for many minutes."""
    if not address or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise StartupError(f"bad Ray address {address!r}: write host:port or auto, on a machine of that Ray cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except (OSError, OverflowError) as error:
        raise StartupError(f"no Ray cluster answers at {address}: {error}") from error


def _check_authentication(address: str) -> None:
    """Raises StartupError when the cluster lets in those without a token."""
    import ray

    # on the head, which lets others in or not: that a worker has a token says nothing about it
    probe = ray.remote(num_cpus=0, resources={HEAD_RESOURCE: 0.001})(_mode_here)
    try:
        mode = ray.get(probe.remote(), timeout=PROBE_DEADLINE_S)
    except ray.exceptions.RayError as error:
        raise StartupError(f"the Ray cluster runs nothing: {_first_line(error)}") from error
    if mode.lower() != "token":
        raise StartupError(
            f"the Ray cluster at {address} runs without token authentication: "
            f"start all its machines with {MODE}=token and one token"
        )


def _mode_here() -> str:
    return os.environ.get(MODE, "")


def find_controller(name: str) -> Any:
    """Its handle. Raises StartupError when the cluster called `name` is not up."""
    import ray

    try:
        return ray.get_actor(CONTROLLER, namespace=namespace_of(name))
    except ValueError as error:
        raise StartupError(f"no cluster called {name!r} is up on this Ray cluster") from error


def start_controller(name: str, *arguments: Any) -> Any:
    """Its handle. Raises StartupError when there is one, in the same act: of two at once, one starts."""
    import ray

    from pd_cluster.launch.on_ray.controller import ControllerActor

    try:
        return (
            ray.remote(ControllerActor)
            .options(
                name=CONTROLLER,
                namespace=namespace_of(name),
                lifetime="detached",
                num_cpus=0,
                resources={HEAD_RESOURCE: 0.001},  # on Ray's head, whose death ends everything anyway
                max_restarts=-1,
                max_task_retries=-1,  # to ask it twice is to ask it once
            )
            .remote(*arguments)
        )
    except ValueError as error:  # Ray's answer to a name that is taken
        raise StartupError(
            f"a cluster called {name!r} is up already: `pd-cluster ray scale` changes it, `down` ends it; "
            "or give this one another name"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
