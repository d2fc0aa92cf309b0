"""Connects to a Ray cluster, always with Ray's token authentication, and checks that the cluster demands it."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray.cluster import CONTROLLER, MODE, authentication_mode, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
HEAD_RESOURCE = "node:__internal_head__"
CONNECT_DEADLINE_S = 10.0
CONTROLLER_ANSWER_S = 5.0  # one that does not answer must not keep `down` waiting
PROBE_DEADLINE_S = 60.0  # includes the start of a worker process
LOCAL_STORE_BYTES = 100_000_000  # of Ray's object store, which we do not use


def prepare_environment(environ: MutableMapping[str, str], home: Path, *, joins: bool) -> None:
    """Turn token authentication on. Call it before Ray is imported. Raises StartupError.

    `joins`: connects to an existing cluster; its token must then be on this machine.
    """
    mode = environ.get(MODE, "token")
    if mode.lower() != "token":
        raise StartupError(f"${MODE} is {mode!r}: a cluster on Ray needs token authentication; unset it")
    path = environ.get(TOKEN_PATH)
    if path and not environ.get(TOKEN) and not Path(path).is_file():
        raise StartupError(f"${TOKEN_PATH}: there is no file {path}")
    if joins and not (environ.get(TOKEN) or path or (home / ".ray" / "auth_token").is_file()):
        raise StartupError(
            f"joining a Ray cluster needs its token: put it into ~/.ray/auth_token, a file that ${TOKEN_PATH} names, "
            f"or ${TOKEN}. Every machine of the cluster needs {MODE}=token and the same token when `ray start` runs"
        )
    environ[MODE] = "token"
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics are sent unless the user asks for them
    if joins:  # retries of a refused driver (despite the name); too few for a Ray that is starting
        environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")


@contextlib.contextmanager
def connected(name: str, address: str, cpus: float = 0.0, *, sends_key: bool = False) -> Iterator[None]:
    """Connect to the Ray cluster at `address` during the block; "": start a Ray on this machine, and end it after.

    `cpus`: what the processes on a started Ray will reserve. `sends_key`: the block gives the cluster's key to Ray.
    Raises StartupError.
    """
    check_address(address)
    prepare_environment(os.environ, Path(os.path.expanduser("~")), joins=bool(address))
    try:
        import ray
    except ImportError as error:
        raise StartupError(f"`pd-cluster ray` needs Ray ({error}): pip install 'pd-cluster[ray]'") from error
    own: dict[str, Any] = {}
    if not address:
        cores = len(os.sched_getaffinity(0))
        own = {
            "include_dashboard": False, "num_cpus": max(cores, math.ceil(2 * cpus)),  # a mere number; room to scale
            "object_store_memory": LOCAL_STORE_BYTES,
        }  # fmt: skip
    try:
        ray.init(
            address=address or "local", namespace=namespace_of(name), log_to_driver=False, logging_level="error", **own
        )
    except Exception as error:  # Ray's own, of a raylet that did not start in its 30 s, is of no narrower class
        where = f"the Ray cluster at {address}" if address else "a Ray on this machine"
        hint = "; check that the token is this cluster's" if address else ""
        raise StartupError(f"cannot reach {where}: {_first_line(error)}{hint}") from error
    try:
        _check_authentication(address, name, sends_key=sends_key)
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise StartupError when nothing listens there. Ray itself would try for many minutes."""
    if not address or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise StartupError(f"bad Ray address {address!r}: write host:port or auto, on a machine of that Ray cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except (OSError, OverflowError) as error:
        raise StartupError(f"no Ray cluster answers at {address}: {error}") from error


def _check_authentication(address: str, name: str, *, sends_key: bool) -> None:
    """Raise StartupError when the cluster admits clients without a token.

    Ray's head is asked, because it admits clients; a token on a worker proves nothing. The controller called `name`
    runs there and tells it in milliseconds, but where no token is needed any client may start an actor of that
    name: its word does not do where the key is sent.
    """
    mode = (None if sends_key else _mode_of_controller(name)) or _mode_of_task()
    if mode.lower() != "token":
        raise StartupError(
            f"the Ray cluster at {address} runs without token authentication: "
            f"start all its machines with {MODE}=token and one token"
        )


def _mode_of_controller(name: str) -> str | None:
    """None: there is none, or it does not answer, or an earlier version started it, which had no such method."""
    import ray

    try:
        method = getattr(find_controller(name), "authentication_mode", None)
        return method and ray.get(method.remote(), timeout=CONTROLLER_ANSWER_S)
    except (StartupError, ray.exceptions.RayError):
        return None


def _mode_of_task() -> str:
    """By a task on Ray's head. Ray starts a worker for it, which takes 1 s. Raises StartupError."""
    import ray

    probe = ray.remote(num_cpus=0, resources={HEAD_RESOURCE: 0.001})(authentication_mode)
    try:
        mode: str = ray.get(probe.remote(), timeout=PROBE_DEADLINE_S)
    except ray.exceptions.RayError as error:
        raise StartupError(f"the Ray cluster cannot run a task: {_first_line(error)}") from error
    return mode


def find_controller(name: str) -> Any:
    """The controller's handle. Raises StartupError when the cluster called `name` is not up."""
    import ray

    try:
        return ray.get_actor(CONTROLLER, namespace=namespace_of(name))
    except ValueError as error:
        raise StartupError(f"no cluster called {name!r} is up on this Ray cluster") from error


def start_controller(name: str, *arguments: Any) -> Any:
    """Start a controller. Returns its handle. Raises StartupError when one exists; of two starts, one succeeds."""
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
                resources={HEAD_RESOURCE: 0.001},  # on Ray's head: the cluster does not survive the head in any case
                max_restarts=-1,
                max_task_retries=-1,  # its methods may be repeated
            )
            .remote(*arguments)
        )
    except ValueError as error:  # Ray raises this for a name that is taken
        raise StartupError(
            f"a cluster called {name!r} is up already: `pd-cluster ray scale` changes it, `down` ends it; "
            "or give this one another name"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
