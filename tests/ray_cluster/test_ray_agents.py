"""A Ray node of tests joins before its agents have begun: a crowded machine needs long to begin them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ray_cluster.machines import SITE, START_DEADLINE_S, Machines

if TYPE_CHECKING:
    from tests.cluster import Launcher

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
GATE = """
import os, runpy, sys, time
runpy.run_path({site!r})
AGENTS = ("dashboard/agent.py", "runtime_env/agent/main.py")
if any(word.endswith(AGENTS) for word in sys.orig_argv):
    while not os.path.exists({gate!r}):
        time.sleep(0.05)
"""
TASK = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print("told", ray.get(ray.remote(lambda: 6 * 7).options(num_cpus=0).remote()))
"""


def test_a_node_joins_before_its_agents(launcher: Launcher, caplog: pytest.LogCaptureFixture) -> None:
    """Both agents of both nodes stand at a gate. After it has been opened a task runs."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        root, gate = Path(folder), Path(folder) / "open"
        (root / "sitecustomize.py").write_text(GATE.format(site=str(SITE / "sitecustomize.py"), gate=str(gate)))
        with Machines(launcher, root, environment={"PYTHONPATH": str(root)}) as machines:
            machines.worker(1)
            assert "once more" not in caplog.text
            gate.touch()
            task = machines.start("task", [sys.executable, "-c", TASK, machines.address])
            task.wait_line("told 42", START_DEADLINE_S)
