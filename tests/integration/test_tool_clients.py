"""Other clients in Python, each as it is installed: a tool is called, its result goes back, the final answer comes."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import pytest

from tests.integration.system import Path, System, running_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("llguidance")

CLIENTS = FilePath(__file__).parent / "tool_clients"
PACKAGES = {
    "langchain": ("langchain-openai",),
    "litellm": ("litellm", "mcp"),  # it imports mcp for a request with tools, and does not ask for it
    "llama_index": ("llama-index-llms-openai-like",),
    "instructor": ("instructor",),
    "litellm_apis": ("litellm[proxy]",),  # streams of Messages import parts of its proxy
}
INSTALL_DEADLINE_S = 600.0
CLIENT_DEADLINE_S = 120.0
SAID = ["get_weather {'city': 'Paris'} The weather in Paris is sunny, 21 degrees."] * 2


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--model=tool_model", "--kv-cache-gb=1") as system:
        yield system


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Gives the interpreter of an environment with one client: their packages do not go together."""

    @cache
    def python(client: str) -> str:
        folder = tmp_path_factory.mktemp(client)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=CLIENT_DEADLINE_S)
        command = [str(folder / "bin" / "pip"), "install", "-q", *PACKAGES[client]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
        if "No matching distribution" in done.stderr:
            pytest.skip(f"no package index has {client}")
        assert done.returncode == 0, done.stderr
        return str(folder / "bin" / "python")

    return python


@pytest.mark.parametrize("route", [Path.P_FIRST, Path.D_FIRST])
@pytest.mark.parametrize(
    ("client", "said"),
    [
        ("langchain", SAID),
        ("litellm", SAID),
        ("llama_index", SAID),
        ("instructor", ["Sum True"] * 3),
        ("litellm_apis", [f"{api} {SAID[0]}" for api in ("chat", "messages", "responses") for _ in range(2)]),
    ],
)
def test_client(client: str, said: list[str], route: Path, system: System, pythons: Callable[[str], str]) -> None:
    command = [pythons(client), str(CLIENTS / f"{client}_client.py"), system.router_url, route.value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said
