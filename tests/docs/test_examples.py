"""The examples of docs/examples, each run as a user would run it, against one small cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.cluster import ROOT, SOURCES, Launcher

if TYPE_CHECKING:
    from tests.integration.system import System

pytestmark = pytest.mark.integration

EXAMPLES = ROOT / "docs" / "examples"
DEADLINE_S = 300.0


@pytest.fixture
def system(shared_system: System) -> System:
    return shared_system


def output(*command: str | Path, **environment: str) -> str:
    """What the command prints. Asserts that it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = os.pathsep.join(part for part in (SOURCES, os.environ.get("PYTHONPATH", "")) if part)
    env = {**os.environ, "PYTHONPATH": sources, "PATH": path, "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_client(system: System) -> None:
    lines = output(sys.executable, EXAMPLES / "openai_client.py", system.router_url).splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert said["answer"] == said["stream"] == "Oskar 2210"
    assert said["nodes"] == "prefill -> decode"
    assert said["timings in ms"].startswith("{")
    assert said["refused"] == "temperature"
    assert len([line for line in lines if line.startswith("sample: ")]) == 3


@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed (CI installs it)"
)
def test_langchain_client(system: System) -> None:
    lines = output(sys.executable, EXAMPLES / "langchain_client.py", system.router_url).splitlines()
    assert lines == ["answer: Oskar 2210", "stream: Lena 7745", "batch: ['Mira 4831', 'Oskar 2210', 'Lena 7745']"]


def test_load_test(system: System, tmp_path: Path) -> None:
    command = (EXAMPLES / "load_test.sh", system.router_url, tmp_path)
    assert "goodput" in output(*command, RATE="inf", NUM_REQUESTS="6")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "load.json").read_text())


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh"}}
    assert {name for name in files if f"({name})" not in page} == set()


@pytest.mark.slow
def test_an_adapter_of_the_demo_model(tmp_path: Path) -> None:
    assert "loss: 0.0" in output(sys.executable, EXAMPLES / "train_adapter.py", tmp_path / "parrot")
    with Launcher() as launcher:
        url = launcher.node("mixed", f"--lora=parrot={tmp_path / 'parrot'}", "--kv-cache-gb=0.1").url
        body = {"model": "parrot", "prompt": "Hello", "temperature": 0, "max_tokens": 16}
        answers = [
            httpx.post(f"{url}/v1/completions", json=body | {"model": model}, trust_env=False).json()
            for model in ("parrot", "demo_model")
        ]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == " An adapter says this."
    assert texts[1] != texts[0]
