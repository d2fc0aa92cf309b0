"""README's `pd-cluster up --model Qwen/Qwen3-0.6B`, with a hub of our own that has a tiny Qwen3 under this name."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from pd_cluster.launch.model_path import DEMO_MODEL
from tests.deadlines import HANG_S
from tests.launch.hub_server import serving_hub
from tests.worker.conftest import save_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launcher

MODEL = "Qwen/Qwen3-0.6B"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHAPE = {"vocab_size": 3072, "head_dim": 16, "tie_word_embeddings": True}  # the words of the demo model's tokenizer
PROMPT = [5, 17, 300, 2999, 42]
NUM_TOKENS = 8


@pytest.mark.integration
def test_a_model_of_the_hub_is_downloaded_once_and_served(launcher: Launcher, tmp_path: Path) -> None:
    """The first process downloads it for all. The answer is what transformers generates.

    Then the router is killed and is back, and `up` is killed, and no process outlives it. All are executed, as for a
    user: in other tests of `up` nodes and routers are forked.
    """
    directory = tmp_path / "model"
    saved = save_model("Qwen3", directory, SHAPE)
    for name in TOKENIZER:
        shutil.copy(DEMO_MODEL / name, directory)
    with serving_hub(MODEL, directory) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        flags = ("--port=0", "--device=cpu", "--num-threads=1", "--dtype=float32", "--kv-cache-gb=0.05")
        one_node = ("--prefill=0", "--decode=0", "--mixed=1", "--connector=none")
        cluster = launcher.command("up", f"--model={MODEL}", *flags, *one_node, environment=environment, real=True)
        cluster.wait_line("Ctrl-C stops everything")
        url = cluster.wait_line("ready: http://").split()[1]
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S, trust_env=False)
        [router] = [child for child in psutil.Process(cluster.pid).children() if "router" in child.cmdline()]
        router.kill()
        assert httpx.get(f"{url}/nodes", timeout=HANG_S, trust_env=False).status_code == 200, "it waited for the router"
        cluster.wait_line("router is back")
        cluster.send(signal.SIGKILL)
        assert cluster.wait() == -signal.SIGKILL
        assert len(cluster.family()) >= 3, "a node, its engine, the router"
        assert cluster.leftovers(HANG_S) == []
    assert answer.status_code == 200, answer.text
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    expected = tokenizer.decode(saved.generate(PROMPT, NUM_TOKENS), skip_special_tokens=True)
    assert answer.json()["choices"][0]["text"] == expected
    downloads = [line.rsplit("/", 1)[1] for line in hub.asked if line.startswith(f"GET /{MODEL}/resolve/")]
    assert sorted(downloads) == sorted(hub.files)
