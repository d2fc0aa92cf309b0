"""Real `pd-cluster` processes for tests: on ports that the OS chose, awaited by their ready lines, ended by id.

with Launcher() as launcher:
    prefill = launcher.node("prefill")
    decode = launcher.node("decode", "--block-size=16")
    router = launcher.router(prefill=[prefill], decode=[decode])
    httpx.post(f"{router.url}/v1/completions", ...)
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.deadlines import HANG_S
from tests.fork_server import COMMANDS, Forked, ForkServer, ForkServerDied
from tests.patient_node import PATIENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "router", "connectors", "kernels"))
CLI = (sys.executable, "-m", "pd_cluster.launch.cli")
READY_DEADLINE_S = 150.0  # a node needed more than 60 s beside nineteen busy processes on two cores
STOP_DEADLINE_S = 60.0
GONE_DEADLINE_S = 60.0
POLL_S = 0.02
NUM_LAST_LINES = 30  # of a process that ended before its launcher
TEST_KEY = "a key that only tests know"
REAL = os.environ.get("PD_TEST_REAL") == "1"  # no command is forked
DEVICE = os.environ.get("PD_TEST_DEVICE", "cpu")  # of the nodes; "cuda": for tests that fix the size of the KV cache


class LaunchFailed(AssertionError):
    """A process ended, or a deadline passed, before what a test waited for. The message holds its output."""


class Launched:
    """One process; a thread collects its output."""

    def __init__(self, name: str, process: subprocess.Popen[str] | Forked) -> None:
        self.name = name
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = process
        self._family: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, name=f"read {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def output(self) -> str:
        with self._changed:
            return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """The address in its ready line."""
        found = re.search(r"https?://\S+", self.wait_line("ready", also="://"))
        assert found, self.output
        return found.group()

    def wait_line(self, marker: str, deadline_s: float = READY_DEADLINE_S, *, also: str = "") -> str:
        """The first line that contains `marker` and `also`. Raises LaunchFailed when the process ends without it."""
        end_s = time.monotonic() + deadline_s
        seen = 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if marker in line and also in line:
                        return line
                seen = len(self.lines)
                if self._ended or not self._changed.wait(end_s - time.monotonic()):
                    raise LaunchFailed(f"{self.name} did not write {marker!r}; it wrote:\n" + "\n".join(self.lines))

    def family(self) -> list[psutil.Process]:
        """This process and all its descendants so far, dead ones included."""
        try:
            for process in psutil.Process(self.pid).children(recursive=True):
                self._family.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass  # it is gone; what was seen before still counts
        return list(self._family.values())

    def send(self, signum: signal.Signals) -> None:
        self.family()
        self._process.send_signal(signum)

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Its exit status. Raises LaunchFailed after `deadline_s`."""
        try:
            status = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise LaunchFailed(f"{self.name} is still running; it wrote:\n{self.output}") from error
        self._reader.join(GONE_DEADLINE_S)
        return status

    def stop(self, signum: signal.Signals = signal.SIGTERM, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Signal it, wait, and return its exit status. Killed when it does not end in time (and LaunchFailed)."""
        if self.returncode is None:
            self.send(signum)
        return self.end(deadline_s)

    def end(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Wait for the end of what was told to stop, and return the exit status. Killed after `deadline_s`."""
        try:
            return self.wait(deadline_s)
        except LaunchFailed:
            self._process.kill()
            self._process.wait()
            raise

    def leftovers(self, deadline_s: float = GONE_DEADLINE_S) -> list[psutil.Process]:
        """Descendants that still live `deadline_s` after this process's end."""
        _, alive = psutil.wait_procs(self.family(), timeout=deadline_s)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def base_environment() -> dict[str, str]:
    """Of every command: this process's, and what makes this source tree importable and tests repeatable."""
    path = os.pathsep.join(part for part in (SOURCES, os.environ.get("PYTHONPATH", "")) if part)
    given = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PD_CLUSTER_KEY": TEST_KEY}
    # The one that collects tests/kernels has it for itself, and the fork server of a run begins before that
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**own, **given}


# The only one of this process, with which it ends, or of all workers of a run. It takes 400 MB, and begins with the
# first command
FORK_SERVER = ForkServer(base_environment, ROOT)
atexit.register(FORK_SERVER.close)


class Launcher:
    """Starts processes and, at its end, stops them all and asserts that none of their descendants is left."""

    def __init__(self, cwd: Path = ROOT) -> None:
        self._cwd = cwd
        self._launched: list[Launched] = []

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Launched:
        """Any command, with this source tree importable. Always a process of its own."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**base_environment(), **(environment or {})}, cwd=self._cwd, process_group=0,
        )  # fmt: skip
        return self._add(name, process)

    def command(self, *arguments: str, environment: Mapping[str, str] | None = None, real: bool = False) -> Launched:
        """`pd-cluster` with these arguments. `real`: not forked, see fork_server.py; some commands never are."""
        given = {**base_environment(), **(environment or {})}
        if real or REAL or arguments[0] not in COMMANDS or FORK_SERVER.differs(given):
            return self.start(arguments[0], [*CLI, *arguments], environment)
        return self._add(arguments[0], FORK_SERVER.start(arguments, given, self._cwd))

    def module(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Launched:
        """`python -m MODULE` with these arguments, forked."""
        given = {**base_environment(), **(environment or {})}
        if REAL:
            return self.start(name, [sys.executable, "-m", module, *arguments], environment)
        return self._add(name, FORK_SERVER.start(arguments, given, self._cwd, module))

    def node(
        self, role: str, *flags: str, environment: Mapping[str, str] = PATIENT, wait: bool = True, real: bool = False
    ) -> Launched:
        """A node on a free port; ready when this returns, unless `wait` is false.

        It is patient; not so with an environment that does not say it, or if it is `real`.
        """
        always = ("--port=0", "--num-threads=1", f"--device={DEVICE}")
        node = self.command(role, *always, *flags, environment=environment, real=real)
        if wait:
            node.wait_line("ready: ")
        return node

    def router(
        self,
        *flags: str,
        prefill: Iterable[Launched] = (),
        decode: Iterable[Launched] = (),
        mixed: Iterable[Launched] = (),
        real: bool = False,
    ) -> Launched:
        """A router on a free port before these nodes; it serves when this returns."""
        roles = {"prefill": prefill, "decode": decode, "mixed": mixed}
        urls = [f"--{role}={node.url}" for role, nodes in roles.items() for node in nodes]
        # To linger for clients that tests left open. A busy machine keeps a healthy node silent for seconds
        flags = ("--port=0", "--linger-s=1", f"--health-timeout-s={HANG_S:g}", *urls, *flags)
        router = self.command("router", *flags, real=real)
        router.wait_line("router ready on ")
        return router

    def _add(self, name: str, process: subprocess.Popen[str] | Forked) -> Launched:
        self._launched.append(launched := Launched(name, process))
        return launched

    def close(self) -> None:
        """Idempotent. All are told to stop, the last started first, and then waited for: each takes a second."""
        failures: list[str] = []
        for launched in reversed(self._launched):
            with suppress(ForkServerDied):  # it is told below
                if launched.returncode is None:
                    launched.send(signal.SIGTERM)
                elif launched.returncode not in (0, -signal.SIGKILL):  # pytest shows it where a test failed by this
                    told = "\n".join(launched.output.splitlines()[-NUM_LAST_LINES:])
                    sys.stderr.write(f"{launched.name} had ended with status {launched.returncode}:\n{told}\n")
        while self._launched:
            launched = self._launched.pop()
            try:
                launched.end()
            except (LaunchFailed, ForkServerDied) as error:
                failures.append(str(error))
            for process in launched.leftovers():
                failures.append(f"{launched.name} left {process.pid} {' '.join(process.cmdline())}")
                process.kill()
        assert not failures, "\n".join(failures)
