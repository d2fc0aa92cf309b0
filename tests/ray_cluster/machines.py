"""Ray nodes for tests: several on this machine, each a process group that can be killed as a whole.

with Machines(launcher, root) as machines:
    machines.ray("up", "cluster.yaml").wait()
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.cluster import LaunchFailed, base_environment
from tests.fork_server import CLI_MODULE
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tests.cluster import Launched, Launcher

logger = logging.getLogger(__name__)

TOKEN = "7e57" * 16
RAY = Path(sys.executable).with_name("ray")
START_DEADLINE_S = 300.0
# What Ray starts beside a head or worker, and no test looks at: 9 s of CPU
LEFT_OUT = ("--include-log-monitor=false", "--disable-usage-stats")
LEFT_OUT_OF_HEAD = ("--include-dashboard=false", "--no-monitor")
SITE = Path(__file__).with_name("site")  # what Ray's processes import first


class Machines:
    """A head and workers. At the end all are killed, and nothing that they started may be left."""

    def __init__(
        self, launcher: Launcher, root: Path, head_gpus: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        """`root`: a directory with a short path, for Ray's sockets. `head_gpus`: see `worker`.

        `environment`: of Ray's processes besides.
        """
        self._launcher = launcher
        self._environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(root),
            "RAY_ADDRESS": "", "PYTHONPATH": f"{SITE}{os.pathsep}{base_environment()['PYTHONPATH']}",
            **(environment or {}),
        }  # fmt: skip
        self.running: list[Launched] = []
        self._root = root
        self.head, line = self._begin(
            "--address=",
            "--head",
            f"--num-gpus={head_gpus}",
            '--resources={"edge": 1}',
            *LEFT_OUT_OF_HEAD,
            f"--temp-dir={root}",
        )
        found = re.search(r"'([\d.]+:\d+)'", line)
        assert found, self.head.output
        self.address = found.group(1)

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in reversed(self.running):
            self.kill(machine)

    def worker(self, gpus: int) -> Launched:
        """One more Ray node, which has joined when this returns. `gpus`: what Ray counts; they need not be there.

        One by one: two that start on one machine at the same moment take the same files.
        """
        return self._begin("Ray runtime started", f"--address={self.address}", f"--num-gpus={gpus}")[0]

    def controller(self) -> psutil.Process:
        """The controller's process, which is on the head."""
        (found,) = (process for process in self.head.family() if cmdline(process).startswith("ray::ControllerActor"))
        return found

    def kill(self, machine: Launched) -> None:
        """As if its power had gone: all of Ray's processes at once, and by their end all that hang on them."""
        machine.family()
        with contextlib.suppress(ProcessLookupError):  # it gave up, and nothing is left of it
            os.killpg(machine.pid, signal.SIGKILL)
        for process in machine.family():  # a worker that was just starting would look for its raylet for a while
            with contextlib.suppress(psutil.NoSuchProcess):
                if "default_worker.py" in cmdline(process):
                    process.kill()
        machine.wait()
        self.running.remove(machine)

    def ray(self, command: str, *arguments: str, environment: dict[str, str] | None = None) -> Launched:
        """`pd-cluster ray COMMAND` with the token. It is forked: it imports Ray itself, and nothing else."""
        return self._launcher.module(
            "ray", CLI_MODULE, "ray", command, *arguments, environment={**self._environment, **(environment or {})}
        )

    def start(self, name: str, command: list[str]) -> Launched:
        """Any command, with the token."""
        return self._launcher.start(name, command, self._environment)

    def _begin(self, marker: str, *arguments: str) -> tuple[Launched, str]:
        """A Ray node, and the line with `marker` that it writes when it is there.

        It begins anew once, and says why: a port may be taken meanwhile, and `ray start` gives up after 30 s. What is
        tested begins after that.
        """
        for is_last in (False, True):
            ports = _ports_of_head() if "--head" in arguments else ()
            # with port 0 its raylet waits for this agent too, as in site/sitecustomize.py
            machine = self._start(*arguments, *ports, f"--runtime-env-agent-port={free_port()}")
            try:
                return machine, machine.wait_line(marker, START_DEADLINE_S)
            except LaunchFailed as error:
                told = f"{error}\n{last_words(self._root)}"
                self.kill(machine)
                if is_last:
                    raise LaunchFailed(told) from error
                logger.warning("Ray did not start; it is started once more. %s", told)
        raise AssertionError("not reached")

    def _start(self, *arguments: str) -> Launched:
        # without CPUs: Ray would start as many processes before they are asked for
        command = [
            str(RAY),
            "start",
            "--block",
            "--object-store-memory=80000000",
            "--num-cpus=0",
            *LEFT_OUT,
            *arguments,
        ]
        machine = self.start("ray node", command)
        self.running.append(machine)
        return machine


def _ports_of_head() -> tuple[str, ...]:
    """With port 0 Ray looks for a free one, and its server may find it taken. The client's server cannot be left out,
    and has 10001 for each head else."""
    return f"--port={free_port()}", f"--ray-client-server-port={free_port()}"


def last_words(root: Path) -> str:
    """The ends of what Ray's own processes logged, which are gone with the folder."""
    logs = [path for name in ("raylet.*", "gcs_server.*", "*agent.*") for path in root.glob(f"session_*/logs/{name}")]
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)


def cmdline(process: psutil.Process) -> str:
    """ "" for a process that is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
