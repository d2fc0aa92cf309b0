"""In Ray's processes of `Machines`: an agent tells its raylet at once that it has no ports, and does no more. With a
relay, a unit starts `forked_node.py` in place of the command line.

Python imports this file at its start, from a directory of $PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

UNIT = "pd_cluster.launch.on_ray.unit"
RELAY = "PD_TEST_FORK_RELAY"
DASHBOARD_AGENT = "/ray/dashboard/agent.py"
RUNTIME_ENV_AGENT = "/ray/_private/runtime_env/agent/main.py"
SERVER_OF_CLIENTS = "ray.util.client.server"
PORTS_OF_AGENT = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
PROGRAM = (sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "forked_node.py"))


class UnitFinder(MetaPathFinder):
    """Finds the module of units, and changes what they start once it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != UNIT:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            assert module._PROGRAM[1:] == ("-P", "-m", "pd_cluster.launch.cli")
            module._PROGRAM = PROGRAM

        loader.exec_module = exec_module
        return spec


def tell_ports(command: Sequence[str]) -> None:
    """Of a dashboard's agent, with this command: -1, for none, where its raylet looks for them.

    A raylet waits 15 s for each before it joins, and then ends: no variable changes that. The agent takes 1.3 s of CPU
    until it tells them, which a crowded core has not in 15 s.
    """
    if not any(word.endswith(DASHBOARD_AGENT) for word in command):
        return
    options = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    for name in PORTS_OF_AGENT:
        path = Path(options["--session-dir"], f"{name}_{options['--node-id']}")
        written = path.with_suffix(".new")  # as Ray does: the raylet may look while it is written
        written.write_text("-1")
        written.rename(path)


def rest_if_unasked(command: Sequence[str]) -> None:
    """Do nothing until the end in place of what Ray starts beside each machine, and no test asks: 4.5 s of CPU for two.

    They are agents of dashboards and of environments for workers, and the server of clients on other machines. A raylet
    ends when an agent of its ends.
    """
    if SERVER_OF_CLIENTS in command or any(word.endswith((DASHBOARD_AGENT, RUNTIME_ENV_AGENT)) for word in command):
        while True:
            signal.pause()


tell_ports(sys.orig_argv)
rest_if_unasked(sys.orig_argv)
if RELAY in os.environ:
    sys.meta_path.insert(0, UnitFinder())
