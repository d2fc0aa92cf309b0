"""A node with files of blocks, in processes: its directory is its own, and kill -9 leaves what a new start finds."""

from __future__ import annotations

import random
import re
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.deadlines import HANG_S, wait_until
from tests.integration.fault_cluster import parse_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launched, Launcher

pytestmark = pytest.mark.integration

CACHE = ("--num-blocks=24", "--host-cache-gb=0.004", "--max-model-len=256")
PROMPTS = [[random.Random(f"{head}/{i}").randrange(5, 200) for i in range(180)] for head in range(12)]


def url_of(node: Launched) -> str:
    """Its ready line is not the only one with that word: its host memory gets ready, too."""
    found = re.search(r"https?://[^ ]+", node.wait_line("ready: "))
    assert found
    return found[0]


def answers(node: Launched) -> list[str]:
    body = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    found = []
    for prompt in PROMPTS:
        answer = httpx.post(f"{url_of(node)}/v1/completions", json=body | {"prompt": prompt}, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["text"])
    return found


def metric(node: Launched, name: str) -> float:
    return parse_metrics(httpx.get(f"{url_of(node)}/metrics", timeout=HANG_S).text).get(name, 0.0)


def test_a_killed_node_finds_its_files_again(launcher: Launcher, tmp_path: Path) -> None:
    flags = (*CACHE, f"--disk-cache-dir={tmp_path}", "--disk-cache-gb=0.1")
    node = launcher.node("mixed", *flags)
    second = launcher.node("mixed", *flags, wait=False)
    assert second.wait(HANG_S) != 0
    assert second.output.count("another node has the disk cache") == 1
    first = answers(node)
    wait_until(lambda: metric(node, "pd_disk_written_total") > 40)
    for process in node.family():
        process.send_signal(signal.SIGKILL)
    node.wait(HANG_S)
    node = launcher.node("mixed", *flags)
    wait_until(lambda: metric(node, "pd_disk_files") > 40)
    assert answers(node) == first
    wait_until(lambda: metric(node, "pd_disk_read_bytes_total") > 0)
    wait_until(lambda: metric(node, "pd_disk_up") == 1)
