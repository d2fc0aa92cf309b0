"""The script of `helm test`, against a real cluster on this machine: and what it says when things are not well."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.deploy import metric_names
from tests.deploy.chart import CHART
from tests.deploy.fake_api import api_server

if TYPE_CHECKING:
    from tests.integration.system import System

PROMTOOL = shutil.which("promtool") or ""
SCRIPT = CHART / "files" / "ask.py"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.integration
def test_script_and_metrics_of_a_live_cluster(shared_system: System) -> None:
    router_url = shared_system.router_url
    done = ask(router_url, "Oskar 2210")
    assert done.returncode == 0, done.stderr
    assert "'Oskar 2210'" in done.stdout
    assert "prefilled by prefill" in done.stdout
    assert "decoded by decode" in done.stdout
    assert ask(router_url, "Lena").returncode == 1

    told = [httpx.get(f"{url}/metrics", trust_env=False).text for url in (*shared_system.urls.values(), router_url)]
    lines = [line for text in told for line in text.splitlines() if not line.startswith("#")]
    live = {line.split("{")[0].split(" ")[0] for line in lines}
    for text in told if PROMTOOL else ():
        check = [PROMTOOL, "check", "metrics"]
        checked = subprocess.run(check, input=text, capture_output=True, text=True, timeout=HANG_S)
        assert (checked.returncode, checked.stderr) == (0, "")
    created = {name for name in live if name.endswith("_created")}  # prometheus_client's own addition
    assert live - created <= metric_names.exported()
    assert "pd_kv_transfer_bytes_total" in live


def test_no_server() -> None:
    done = ask("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "did not answer" in done.stderr


def test_a_server_without_the_model() -> None:
    with api_server({"/v1/models": {"data": []}}, []) as url:
        done = ask(url)
    assert done.returncode == 1
    assert "did not answer" in done.stderr
