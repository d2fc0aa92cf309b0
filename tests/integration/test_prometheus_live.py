"""A real Prometheus scrapes a router, P and D under requests, and runs each expression of dashboard and alerts.

Prometheus is not a dependency (Debian: prometheus); $PROMETHEUS names its program.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.deploy import metric_names

if TYPE_CHECKING:
    from pathlib import Path

PROMETHEUS = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian); $PROMETHEUS names it"),
]
TRAFFIC_S = 30.0
NODE_FLAGS = ("--min-remote-tokens=1", "--host-cache-gb=0.05", "--speculation=lookup")
REPEATED = {"max_tokens": 40, "guided_regex": "(ab){20}"}  # drafts tell it in advance
# Panels that show what does not happen here: missed targets, prompts that D reads, failures, large transfers
ON_EVENT = {
    "SLO attainment B", "Not handed over: mean seconds, stacked A", "Not handed over: mean seconds, stacked B",
    "Handoffs and fallbacks B", "KV read C", "Failed legs A",
}  # fmt: skip


def config(folder: Path, urls: list[str]) -> Path:
    targets = [{"targets": [urlsplit(url).netloc for url in urls], "labels": {"namespace": "live"}}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(metric_names.ALERTS)],
        "scrape_configs": [{"job_name": "pd-cluster", "static_configs": targets}],
    }))  # fmt: skip
    return path


def ask(url: str, path: str, **query: str) -> Any:
    answer = httpx.get(f"{url}/api/v1/{path}", params=query, trust_env=False).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def test_every_expression_runs_and_those_of_the_dashboard_find_something(tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    with Launcher() as launcher:
        nodes = [launcher.node(role, *NODE_FLAGS, wait=False) for role in ("prefill", "decode")]
        flags = [f"--{role}={node.url}" for role, node in zip(("prefill", "decode"), nodes, strict=True)]
        flags += [
            "--slo-ttft-ms=60000",
            "--slo-tpot-ms=5000",
            "--prefill-on-decode=never",
            f"--health-timeout-s={HANG_S:g}",
        ]
        router = launcher.command("router", "--port=0", *flags)
        router.wait_line("router ready on ")
        path = config(tmp_path, [one.url for one in (router, *nodes)])
        command = [PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        prometheus = launcher.start("prometheus", [*command, "--web.listen-address=127.0.0.1:0"])
        address = re.search(r"address=(127\.0\.0\.1:\d+)", prometheus.wait_line("Listening on"))
        assert address
        prometheus.wait_line("Server is ready")
        url, ends_s, number = f"http://{address[1]}", time.monotonic() + TRAFFIC_S, 0
        while time.monotonic() < ends_s:
            number += 1
            body = {"prompt": f"{number}. " + "The old man walked to the river. " * 20, "stream": True, **REPEATED}
            answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
        empty = set()
        for panel, text in metric_names.dashboard_expressions().items():
            query = text.replace("$__rate_interval", "20s").replace("$namespace", ".*")
            if all(sample["value"][1] == "NaN" for sample in ask(url, "query", query=query)["result"]):
                empty.add(panel)
        assert sorted(empty - ON_EVENT) == []
        for expression in metric_names.alert_expressions().values():
            ask(url, "query", query=expression)
        rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(metric_names.alert_expressions(), "ok")
