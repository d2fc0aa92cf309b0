"""Starts `pd-cluster` commands by forking a process that has imported everything: imports are most of a start's CPU.

    pytest                        the server (forked_command.py)            a child
      ForkServer.start: arguments,
        environment, cwd, streams ──► imports once, then forks ───────────► takes these, and runs cli.main as __main__
      Forked ◄── pid and pidfd ────── waits for it                          a node forks its engine, see SpareEngine
             ◄── exit status ────────

A child is like a process of its own: it has one thread, no descriptor of the server, its own random numbers and exactly
the environment that it was given. /proc shows the command line that it stands for. It differs in this:

- The seed of str hashes is the server's: sets of strings have the same order in all children of a server.
- The API process has torch, which a process of its own does without (`node_process.leave_out_torch`).
- /proc/PID/environ shows the server's environment.
- Memory that it shares with the server counts as its own.
- It gets SIGTERM when the server ends, as it does with the tests: a run that is killed leaves no node behind.
- It ends without clearing its modules, once what is registered for the exit has run (forked_command.end_process).

Tests of these things, and of processes that start processes, keep the real command (`Launcher.start`, `real=True`):
one `up` with all that it starts (test_hub_model.py; of others, nursery.py forks nodes and router), `ray`, `pool` and
`check`; the wheel, the lifeline and `supervise`; workers and successors of a router; the API process with a fake engine
(test_node_process.py); `cli.main` (test_environment.py, test_cli.py, test_node_commands.py); tests of security that
measure memory. So does a start with a variable that may matter to an import, see FREE, and with PD_TEST_REAL=1 every
one.

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
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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


class ForkServer:
    """The side of the tests. The process starts with the first command and ends at `close`, or with this process.

    Its methods may be called from several threads.
    """

    def __init__(self, environment: Callable[[], dict[str, str]], cwd: Path, modules: str = "all") -> None:
        """`environment`: of all commands but for the variables of FREE; asked for when the first one starts.

        `modules`: what is imported, "none" for a server that starts at once.
        """
        self._make_environment = environment
        self._modules = modules
        self._cwd = cwd
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._last_words = "the fork server of this process has ended"  # of the last one that ended

    def differs(self, environment: Mapping[str, str]) -> set[str]:
        """The variables for which a command with this environment must be a process of its own."""
        with self._lock:
            changed = self.environment.items() ^ environment.items()
        return {name for name, _ in changed if not name.startswith(FREE)}

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        return self._make_environment()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, module: str = CLI_MODULE
    ) -> Forked:
        """Run `python -m MODULE` with these arguments, without input and in a process group of its own.

        Raises ForkServerDied; the next call starts another server.
        """
        order = json.dumps([module, [*arguments], dict(environment), str(cwd)]).encode()
        ours, theirs = socket.socketpair()
        output, written = os.pipe()
        with ours, open(os.devnull, "rb") as stdin:
            with theirs, open(written, "wb") as stdout:
                process = self.order(order, [one.fileno() for one in (stdin, stdout, stdout, theirs)])
            told, fds, _, _ = socket.recv_fds(ours, MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not told:
                os.close(output)
                raise ForkServerDied(self._bury(process))
            return Forked(int(told), fds[0], ours.detach(), open(output), lambda: self._bury(process))

    def order(self, order: bytes, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """Send an order and its descriptors: streams from number 0 on, then the socket for answers. The server."""
        with self._lock:  # no other thread buries the server meanwhile
            if self._running is None:
                self._running = self._begin()
            process, orders = self._running
            with suppress(BrokenPipeError):
                socket.send_fds(orders, [order], fds)
        return process

    def close(self) -> None:
        """Idempotent. Commands that run are told to end (SIGTERM)."""
        if self._running is not None:
            self._bury(self._running[0])

    def _begin(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # no message is ever cut
        with theirs:
            own = [str(theirs.fileno()), self._modules, "." * SHOWN_BYTES]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.forked_command", *own],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=self.environment, cwd=self._cwd, process_group=0, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        return process, ours

    def _bury(self, process: subprocess.Popen[bytes]) -> str:
        """End this server, if it has not ended, and return what it wrote."""
        with self._lock:
            if self._running is None or self._running[0] is not process:
                return self._last_words
            orders, self._running = self._running[1], None
        orders.close()
        output, _ = process.communicate(timeout=DEATH_S)
        self._last_words = f"the fork server ended with status {process.returncode}; it wrote:\n{output.decode()}"
        return self._last_words


class Forked:
    """A child of the server: what tests use of `subprocess.Popen`.

    Signals go by a pidfd, so that they reach no other process when the id is used again.
    """

    def __init__(self, pid: int, pidfd: int, answers: int, stdout: TextIO, bury: Callable[[], str]) -> None:
        self.pid = pid
        self.stdout = stdout
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
