"""The script of `helm test`, against a real cluster on this machine: and what it says when things are not well."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.deploy import metric_names
from tests.deploy.chart import CHART
from tests.deploy.fake_api import api_server

if TYPE_CHECKING:
    from tests.cluster import Launcher

PROMTOOL = shutil.which("promtool") or ""
SCRIPT = CHART / "files" / "ask.py"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.integration
def test_script_and_metrics_of_a_live_cluster(launcher: Launcher) -> None:
    prefill, decode = launcher.node("prefill"), launcher.node("decode")
    router = launcher.router(prefill=[prefill], decode=[decode])
    done = ask(router.url, "Oskar 2210")
    assert done.returncode == 0, done.stderr
    assert "'Oskar 2210'" in done.stdout
    assert "prefilled by prefill-" in done.stdout
    assert "decoded by decode-" in done.stdout
    assert ask(router.url, "Lena").returncode == 1

    live = {
        line.split("{")[0].split(" ")[0]
        for part in (prefill, decode, router)
        for line in httpx.get(f"{part.url}/metrics").text.splitlines()
        if not line.startswith("#")
    }
    for part in (prefill, decode, router) if PROMTOOL else ():
        text = httpx.get(f"{part.url}/metrics").text
        checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
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
