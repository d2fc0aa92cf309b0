"""A cluster on a Ray of its own: one command, one machine, ended by Ctrl-C."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.ray_cluster.ray_clusters import QUESTION

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launcher

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]
DEADLINE_S = 180.0
CLUSTER = """
flags: {kv-cache-gb: 0.1}
decode: {count: 1}
prefill: {count: 1}
router: {count: 1, flags: {port: 0}}
"""


def test_ctrl_c_ends_the_cluster_and_its_ray(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as home:
        environment = {"HOME": home, "RAY_ADDRESS": "", "RAY_TMPDIR": home}
        up = launcher.command("ray", "up", str(file), environment=environment)
        ready = up.wait_line("ready: ", DEADLINE_S)
        url = next(word for word in ready.split() if word.startswith("http://127.0.0.1:"))
        up.wait_line("Ctrl-C stops everything")
        answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=60, trust_env=False)
        assert answer.json()["choices"][0]["message"]["content"].startswith("Oskar 2210")
        up.family()
        os.killpg(up.pid, signal.SIGINT)  # as a terminal does: Ray's own processes hear it too
        assert up.wait(DEADLINE_S) == 0, up.output
        assert up.lines[-1] == "stopped"
        assert not up.leftovers()
