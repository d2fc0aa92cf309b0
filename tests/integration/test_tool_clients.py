"""Other clients, each as it is installed: a tool is called, its result goes back, the final answer comes."""

from __future__ import annotations

import shutil
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
NODE_PACKAGES = ("openai", "@anthropic-ai/sdk")
INSTALL_DEADLINE_S = 600.0
CLIENT_DEADLINE_S = 120.0
SAID = ["get_weather {'city': 'Paris'} The weather in Paris is sunny, 21 degrees."] * 2


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--model=tool_model") as system:
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


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    """A folder in which node finds the packages, with the client."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no node")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(CLIENTS / "node_apis_client.mjs", folder)
    command = [npm, "install", "--no-fund", "--no-audit", *NODE_PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    if done.returncode != 0 and ("E404" in done.stderr or "ENOTFOUND" in done.stderr):
        pytest.skip("no package registry has the clients")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("route", [Path.P_FIRST, Path.D_FIRST])
def test_node_clients(route: Path, system: System, node_folder: FilePath) -> None:
    command = ["node", "node_apis_client.mjs", system.router_url, route.value]
    done = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, timeout=CLIENT_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    last = "The weather in Paris is sunny, 21 degrees."
    assert done.stdout.splitlines() == [
        *[f'messages tool_use get_weather {{"city":"Paris"}} {last} true'] * 2,
        *[f'responses completed get_weather {{"city": "Paris"}} {last}'] * 2,
        "BadRequestError 400 NotFoundError 404 BadRequestError 400",
    ]
