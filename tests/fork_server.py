"""Starts `pd-cluster` commands by forking a process that has imported everything: imports are most of a start's CPU.

    pytest                        the server (forked_command.py)            a child
      ForkServer.start: arguments,
        environment, cwd, streams ──► imports once, then forks ───────────► takes these, and runs cli.main as __main__
      Forked ◄── pid and pidfd ────── waits for it                          a node forks its engine, see Spare
             ◄── exit status ────────

A child is like a process of its own: it has one thread, no descriptor of the server, its own random numbers and exactly
the environment that it was given. /proc shows the command line that it stands for. It differs in this:

- The seed of str hashes is the server's: sets of strings have the same order in all children of a server.
- The API process has torch, which a process of its own does without (`node_process.leave_out_torch`).
- /proc/PID/environ shows the server's environment.
- Memory that it shares with the server counts as its own.
- It gets SIGTERM when the server ends, as it does with the tests: a run that is killed leaves no node behind.
- Its `__main__` is the command line that the server has imported, and its parser was built there (run_imported).
- It ends without clearing its modules, once what is registered for the exit has run (forked_command.end_process).
- NIXL's progress thread looks for messages 100 times a second in place of 1000: 1% of a core for each idle node.

Tests of these things, and of processes that start processes, keep the real command (`Launcher.start`, `real=True`):
one `up` with all that it starts (test_hub_model.py; of others, nursery.py forks nodes and router), `ray`, `pool` and
`check`; the wheel, the lifeline and `supervise`; workers and successors of a router; the API process with a fake engine
(test_node_process.py); `cli.main` (test_environment.py, test_cli.py, test_node_commands.py); tests of security that
measure memory. So does a start with a variable that may matter to an import, see FREE, and with PD_TEST_REAL=1 every
one.

The workers of a run share one server (`SharedForks`): its imports take 4 s of CPU and 400 MB. It ends with the process
that runs pytest, and the children of a worker with that worker.

PD_TEST_ENGINE_HOOK=module:function is called in a node's engine before it starts, PD_TEST_NODE_HOOK in the node itself.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CLI_MODULE = "pd_cluster.launch.cli"
COMMANDS = ("up", "prefill", "decode", "mixed", "router", "nodes", "epp")
SHOWN_BYTES = 4000  # for the command line that a child shows; the kernel shows one page
MAX_ANSWER_BYTES = 32
DEATH_S = 60.0  # from the end of the server's socket to the end of its process
# No import of the server's depends on variables with these beginnings: UCX is loaded when a node makes its agent, what
# uses LMCache, Mooncake or Ray imports it, and the product itself sets the level of NIXL's log. Torch sets the place of
# its compiler's cache in the tests' process, when transformers loads a model there
FREE = (
    "PD_", "PYTEST_", "KUBECONFIG", "UCX_", "GLOO_", "LMCACHE_", "MC_", "GLOG_", "RAY_", "NIXL_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip


class ForkServerDied(AssertionError):
    """The message holds the server's output."""


SHARED_ENV = "PD_TEST_FORKS"  # the path of the server's socket, in workers that share one


class SharedForks:
    """The server of all workers of a run. It imports when the first one connects, and ends at `close`."""

    def __init__(self, folder: Path, environment: dict[str, str], cwd: Path, modules: str = "all") -> None:
        """`folder`: for its files. `variables` in the environment of a process lead it there."""
        path = folder / "forks"
        beside(path, "environment").write_text(json.dumps(environment))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door, beside(path, "output").open("wb") as output:
            door.bind(str(path))
            door.listen()
            self._process = start_server(door, modules, environment, cwd, stdin=subprocess.PIPE, stdout=output)
        self.variables = {SHARED_ENV: str(path)}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEATH_S)


class OwnServer:
    """A server of this process alone, as its client sees it."""

    def __init__(self, modules: str, environment: dict[str, str], cwd: Path) -> None:
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # no message is ever cut
        with theirs:
            self._process = start_server(
                theirs, modules, environment, cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )

    def end(self) -> str:
        """What it wrote."""
        self.orders.close()
        output, _ = self._process.communicate(timeout=DEATH_S)
        return f"ended with status {self._process.returncode}; it wrote:\n{output.decode()}"


class SharedServer:
    """That of all workers, as one of its clients sees it. Raises OSError when it is not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.orders.connect(str(path))
        except OSError:
            self.orders.close()
            raise

    def end(self) -> str:
        self.orders.close()
        return f"of all workers is left; it wrote:\n{beside(self._path, 'output').read_text(errors='replace')}"


def beside(path: Path, what: str) -> Path:
    return path.with_suffix(f".{what}")


def start_server(
    orders: socket.socket, modules: str, environment: dict[str, str], cwd: Path, *, stdin: int, stdout: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    own = [str(orders.fileno()), modules, "." * SHOWN_BYTES]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.forked_command", *own], stdin=stdin, stdout=stdout,
        stderr=subprocess.STDOUT, env=environment, cwd=cwd, process_group=0, pass_fds=(orders.fileno(),),
    )  # fmt: skip


class ForkServer:
    """The side of the tests. The process starts with the first command and ends at `close`, or with this process.

    Its methods may be called from several threads.
    """

    def __init__(self, environment: Callable[[], dict[str, str]], cwd: Path, modules: str = "all") -> None:
        """`environment`: of all commands but for the variables of FREE; asked for when the first one starts.

        `modules`: what is imported, "none" for a server that starts at once. With "all" the workers' server is used
        where there is one.
        """
        self._make_environment = environment
        self._modules = modules
        self._cwd = cwd
        self._lock = threading.Lock()
        self._running: OwnServer | SharedServer | None = None
        shared = os.environ.get(SHARED_ENV) if modules == "all" else None
        self._shared = Path(shared) if shared else None
        self._last_words = "the fork server of this process has ended"  # of the last one that ended

    def differs(self, environment: Mapping[str, str]) -> set[str]:
        """The variables for which a command with this environment must be a process of its own."""
        with self._lock:
            changed = self.environment.items() ^ environment.items()
        return {name for name, _ in changed if not name.startswith(FREE)}

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        if self._shared is not None:
            found: dict[str, str] = json.loads(beside(self._shared, "environment").read_text())
            return found
        return self._make_environment()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, module: str = CLI_MODULE
    ) -> Forked:
        """Run `python -m MODULE` with these arguments, without input and in a process group of its own.

        Raises ForkServerDied; the next call starts another server.
        """
        output, written = os.pipe()
        try:
            with open(os.devnull, "rb") as stdin, open(written, "wb") as stdout:
                streams = stdin.fileno(), stdout.fileno(), stdout.fileno()
                forked = self.fork(module, arguments, environment, cwd, streams)
        except ForkServerDied:
            os.close(output)
            raise
        forked.stdout = os.fdopen(output)
        return forked

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, streams: Sequence[int]
    ) -> Forked:
        """The same with these streams, from number 0 on."""
        order = json.dumps([module, [*arguments], dict(environment), str(cwd)]).encode()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                server = self.order(order, [*streams, theirs.fileno()])
            told, fds, _, _ = socket.recv_fds(ours, MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not told:
                raise ForkServerDied(self._bury(server))
            return Forked(int(told), fds[0], ours.detach(), lambda: self._bury(server))

    def order(self, order: bytes, fds: Sequence[int]) -> OwnServer | SharedServer:
        """Send an order and its descriptors: streams from number 0 on, then the socket for answers. The server."""
        with self._lock:  # no other thread buries the server meanwhile
            if self._running is None:
                self._running = self._begin()
            server = self._running
            with suppress(ConnectionError):
                socket.send_fds(server.orders, [order], fds)
        return server

    def begin(self) -> None:
        """Start the server, if none runs, with what this thread has. It is started by the first command else."""
        with self._lock:
            if self._running is None:
                self._running = self._begin()

    def close(self) -> None:
        """Idempotent. Commands that run are told to end (SIGTERM)."""
        if self._running is not None:
            self._bury(self._running)

    def _begin(self) -> OwnServer | SharedServer:
        if self._shared is not None:
            with suppress(OSError):  # it has died
                return SharedServer(self._shared)
        return OwnServer(self._modules, self.environment, self._cwd)

    def _bury(self, server: OwnServer | SharedServer) -> str:
        """End this server, if it has not ended, and return what it wrote."""
        with self._lock:
            if self._running is server:
                self._running = None
                self._last_words = f"the fork server {server.end()}"
            return self._last_words


class Forked:
    """A child of the server: what tests use of `subprocess.Popen`.

    Signals go by a pidfd, so that they reach no other process when the id is used again.
    """

    stdin: IO[bytes]
    stdout: TextIO

    def __init__(self, pid: int, pidfd: int, answers: int, bury: Callable[[], str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._answers = answers
        self._bury = bury
        self._lock = threading.Lock()
        for fd in (pidfd, answers):  # as long as any thread may use it
            weakref.finalize(self, os.close, fd)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired, and ForkServerDied when the status cannot be known."""
        status = self._look(None if timeout is None else max(0, round(timeout * 1000)))
        if status is None:
            raise subprocess.TimeoutExpired(f"pd-cluster, process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, signum: int) -> None:
        """Harmless when it has ended, also when its status cannot be known."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_ms: int | None) -> int | None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if self.returncode is None and poll.poll(timeout_ms):
            with self._lock:
                if self.returncode is None:
                    told = os.read(self._answers, MAX_ANSWER_BYTES)  # the server tells it at once
                    if not told:
                        raise ForkServerDied(self._bury())
                    self.returncode = int(told)
        return self.returncode
