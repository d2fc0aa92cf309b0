"""Behind vLLM's own router, which asks P for at least one token whatever the client asks for: the answers are D's.

It is installed into a virtual environment of this test's own; without a package index the test says so and is skipped.
"""

from __future__ import annotations

import socket
import subprocess
import venv
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cluster import Launcher
from tests.integration.foreign import COMPLETIONS, num_redraws
from tests.integration.system import System, ask_url, running_system, wait_until
from tests.integration.test_first_token import BASE, CASES, STREAM, check_same
from tests.integration.test_sampling_parity import EOS, STORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGE = "vllm-router==0.1.17"
INSTALL_DEADLINE_S = 300.0
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def router_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed program."""
    directory = tmp_path_factory.mktemp("vllm-router")
    venv.create(directory, with_pip=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{PACKAGE} cannot be installed here: {error.stderr.strip().splitlines()[-1:]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PACKAGE} cannot be installed here within {INSTALL_DEADLINE_S:g} s")
    return directory / "bin" / "vllm-router"


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--kv-cache-gb=0.1", own_mixed=True) as system:
        yield system


@pytest.fixture(scope="module")
def foreign_url(router_program: Path, system: System) -> Iterator[str]:
    port, metrics_port = free_ports(2)
    command = [
        str(router_program), "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={metrics_port}",
        "--vllm-pd-disaggregation", "--kv-connector=nixl", "--policy=round_robin",
        "--prefill", system.urls["prefill"], "--decode", system.urls["decode"],
    ]  # fmt: skip
    with Launcher() as launcher:
        router = launcher.start("vllm-router", command)
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_healthy(url), lambda: router.output)
        yield url


def free_ports(count: int) -> list[int]:
    """Free now: that router cannot be told to take any."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_an_end_that_p_may_not_sample_is_sampled_by_d(system: System, foreign_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    body |= {"logit_bias": {str(EOS): 100}}
    before = num_redraws(system)
    [answer] = ask_url(foreign_url, [(CHAT, body)])
    assert (answer.choices[0]["message"]["content"], answer.choices[0]["finish_reason"]) == ("", "stop")
    assert answer.body["usage"]["completion_tokens"] == 1
    assert num_redraws(system) == before + 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_every_parameter(name: str, stream: bool, system: System, foreign_url: str) -> None:
    more, values = CASES[name]
    bodies = [BASE | more | {name: value} for value in values]
    mixed = system.ask_node_all("mixed", [(COMPLETIONS, body) for body in bodies])
    read = system.metric("decode", "pd_external_tokens_total")
    extra = {"cache_salt": f"{name} {stream}"} | (STREAM if stream else {})
    for answer, expected in zip(ask_url(foreign_url, [(COMPLETIONS, b | extra) for b in bodies]), mixed, strict=True):
        check_same(answer, expected)
    assert system.metric("decode", "pd_external_tokens_total") > read, "the KV was moved"


def test_a_leg_that_asks_for_a_token_anyway_has_its_token_used(system: System, foreign_url: str) -> None:
    """With `min_tokens` 1 of the client the two legs are equal."""
    body: dict[str, Any] = BASE | {"min_tokens": 1, "seed": None, "cache_salt": "equal"}
    before = num_redraws(system)
    ask_url(foreign_url, [(COMPLETIONS, body)])
    assert num_redraws(system) == before


def test_several_prompts(system: System, foreign_url: str) -> None:
    body = BASE | {"prompt": [STORY, "It was cold and"], "temperature": 0}
    [answer] = ask_url(foreign_url, [(COMPLETIONS, body)])
    check_same(answer, system.ask_node("mixed", COMPLETIONS, body))
