"""Packages of OpenAI and Anthropic for node, and the AI SDK, as npm installs them, before the router in both orders."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import pytest

from tests.integration.system import Path, System, running_system

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("llguidance")

CLIENTS = FilePath(__file__).parent / "tool_clients"
AI_SDK = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")
PACKAGES = ("openai", "zod", "@anthropic-ai/sdk", *AI_SDK)  # npm takes the newest that the installed node can run
INSTALL_DEADLINE_S = 600.0
CLIENT_DEADLINE_S = 120.0
LEFT_TOKENS = 3000  # of the answer that its client leaves
ROUTES = (Path.P_FIRST, Path.D_FIRST)
GREETING = "I can tell the weather and add numbers."
WEATHER = "The weather in Paris is sunny, 21 degrees."


@pytest.fixture(scope="module")
def vectors_system() -> Iterator[System]:
    """P and D that serve vectors."""
    with running_system("--model=tool_model", "--task=embed") as system:
        yield system


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    """A folder in which node finds the packages, with the clients."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no node")
    folder = tmp_path_factory.mktemp("node")
    for client in CLIENTS.glob("*.mjs"):
        shutil.copy(client, folder)
    command = [npm, "install", "--no-fund", "--no-audit", *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    if done.returncode != 0 and ("E404" in done.stderr or "ENOTFOUND" in done.stderr):
        pytest.skip("no package registry has the clients")
    assert done.returncode == 0, done.stderr
    return folder


def said_by(folder: FilePath, client: str, *arguments: str) -> list[str]:
    """The lines that a client writes. Asserts that it succeeds."""
    done = subprocess.run(
        ["node", client, *arguments], cwd=folder, capture_output=True, text=True, timeout=CLIENT_DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("route", ROUTES)
def test_openai(route: Path, tool_system: System, vectors_system: System, node_folder: FilePath) -> None:
    urls = tool_system.router_url, vectors_system.router_url
    before = tool_system.settled_metric("decode", "pd_generation_tokens_total")
    assert said_by(node_folder, "node_openai_client.mjs", *urls, route.value) == [
        f"chat stop {GREETING}",
        "parse true",
        *[f"tools tool_calls get_weather Paris {WEATHER}"] * 2,
        *[f"runner {WEATHER} Paris"] * 2,
        f"responses completed {GREETING} true",
        "embeddings 2 true",
        "refusals NotFoundError 404 model BadRequestError 400 temperature BadRequestError 400 temperature "
        "BadRequestError 400 null",
        "leaving true",
    ]
    tool_system.settle()
    generated = tool_system.settled_metric("decode", "pd_generation_tokens_total") - before
    assert generated < LEFT_TOKENS, "the request of the client that left has ended with it"


@pytest.mark.parametrize("route", ROUTES)
def test_messages_and_responses(route: Path, tool_system: System, node_folder: FilePath) -> None:
    assert said_by(node_folder, "node_apis_client.mjs", tool_system.router_url, route.value) == [
        *[f'messages tool_use get_weather {{"city":"Paris"}} {WEATHER} true'] * 2,
        *[f'responses completed get_weather {{"city": "Paris"}} {WEATHER}'] * 2,
        "BadRequestError 400 NotFoundError 404 BadRequestError 400",
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_ai_sdk(route: Path, tool_system: System, node_folder: FilePath) -> None:
    providers = ("chat", "responses", "compatible", "messages")
    said = [f"{name} {WEATHER} Paris" for name in providers for _ in range(2)]
    assert said_by(node_folder, "ai_sdk_client.mjs", tool_system.router_url, route.value) == said
