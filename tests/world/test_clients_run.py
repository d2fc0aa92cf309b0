"""Real agents, as npm installs them, each once against `pd-cluster up`: they must end well and have had an answer.

The model is tiny and random. A draw of eight ends its answer, so that no client waits for 65,536 tokens.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

import pd_cluster
from tests.cluster import Launcher
from tests.world.bodies import client_specs
from tests.world.packages import world_folder
from tests.world.real_clients import REAL_CLIENTS, RealClient, environment, install

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

TOOL_MODEL = Path(pd_cluster.__file__).parent / "tool_model"
TEMPLATE = Path(__file__).parent / "clients.jinja"
MODEL = "tiny"
CLIENT_DEADLINE_S = 300.0
NUM_ENDS = 64  # of the 512 ids: tokens that end an answer
SHAPE = {
    "hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
    "max_position_embeddings": 1 << 17, "eos_token_id": [2, *range(449, 448 + NUM_ENDS)],
}  # fmt: skip


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    directory = tmp_path_factory.mktemp("model") / MODEL
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOOL_MODEL / name, directory / name)
    config = json.loads((TOOL_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | SHAPE))
    with Launcher() as launcher:
        cluster = launcher.command(
            "up", "--port=0", f"--model={directory}", f"--served-model-name={MODEL}", "--load-format=dummy",
            f"--chat-template={TEMPLATE}", "--kv-cache-gb=0.2", "--prefill=1", "--decode=1", "--quiet",
        )  # fmt: skip
        yield cluster.url


def answered(router: str) -> float:
    """Requests that the router has answered well."""
    total = 0.0
    for line in httpx.get(f"{router}/metrics", trust_env=False).text.splitlines():
        if line.startswith("pd_router_requests_total{") and 'outcome="ok"' in line:
            total += float(line.rsplit(" ", 1)[1])
    return total


@pytest.mark.parametrize("client", REAL_CLIENTS, ids=lambda client: client.spec)
def test_a_client_runs(client: RealClient, router: str, tmp_path: Path) -> None:
    version = client_specs()[client.spec].head["version"]
    program = install(client, version, world_folder() / "clients")
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=work, check=True, timeout=CLIENT_DEADLINE_S)
    asked = client.prepare(tmp_path, router, MODEL)
    before = answered(router)
    done = subprocess.run(
        [program, *asked.arguments], cwd=work, env=environment(tmp_path, work) | asked.environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CLIENT_DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert answered(router) > before
