"""Ray nodes for tests: several on this machine, each a process group that can be killed as a whole.

with Machines(launcher, root) as machines:
    machines.ray("up", "cluster.yaml").wait()
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from types import TracebackType

    from tests.cluster import Launched, Launcher

TOKEN = "7e57" * 16
RAY = Path(sys.executable).with_name("ray")
START_DEADLINE_S = 90.0


class Machines:
    """A head and workers. At the end all are killed, and nothing that they started may be left."""

    def __init__(self, launcher: Launcher, root: Path, token: str = TOKEN) -> None:
        """`root`: a directory with a short path, for Ray's sockets."""
        self._launcher = launcher
        self._environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(root),
            "RAY_ADDRESS": "",
        }  # fmt: skip
        self.running: list[Launched] = []
        head = self.head = self._start(
            "--head",
            "--port=0",
            "--num-cpus=0",
            '--resources={"edge": 1}',
            "--include-dashboard=false",
            f"--temp-dir={root}",
        )
        found = re.search(r"'([\d.]+:\d+)'", head.wait_line("--address=", START_DEADLINE_S))
        assert found, head.output
        self.address = found.group(1)

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in reversed(self.running):
            self.kill(machine)

    def worker(self, cpus: int, gpus: int) -> Launched:
        """One more Ray node, which has joined when this returns. `gpus`: what Ray counts; they need not be there.

        One by one: two that start on one machine at the same moment take the same files.
        """
        machine = self._start(f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}")
        machine.wait_line("Ray runtime started", START_DEADLINE_S)
        return machine

    def controller(self) -> psutil.Process:
        """The controller's process, which is on the head."""
        (found,) = (process for process in self.head.family() if cmdline(process).startswith("ray::ControllerActor"))
        return found

    def kill(self, machine: Launched) -> None:
        """As if its power had gone: all of Ray's processes at once, and by their end all that hang on them."""
        machine.family()
        os.killpg(machine.pid, signal.SIGKILL)
        for process in machine.family():  # a worker that was just starting would look for its raylet for a while
            with contextlib.suppress(psutil.NoSuchProcess):
                if "default_worker.py" in cmdline(process):
                    process.kill()
        machine.wait()
        self.running.remove(machine)

    def ray(self, command: str, *arguments: str, environment: dict[str, str] | None = None) -> Launched:
        """`pd-cluster ray COMMAND` with the token."""
        return self._launcher.command(
            "ray", command, *arguments, environment={**self._environment, **(environment or {})}
        )

    def _start(self, *arguments: str) -> Launched:
        command = [str(RAY), "start", "--block", "--object-store-memory=80000000", "--disable-usage-stats", *arguments]
        machine = self._launcher.start("ray node", command, self._environment)
        self.running.append(machine)
        return machine


def cmdline(process: psutil.Process) -> str:
    """ "" for a process that is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
