"""torch's expandable segments and the KV cache on a GPU: NIXL must be able to read the cache fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEADLINE_S = 300.0
# Prints whether torch's own memory, the cache's, and torch's after it can be read by other processes
CACHE = """
import json, torch
from pd_cluster.worker.kv_cache import KVCache
from pd_cluster.worker.plain_memory import is_plain
from pd_connectors.nixl.gpu_memory import is_readable, open_driver
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.slabs import KvSlabs
from tests.worker.test_capacity import SPECS
device = torch.device("cuda", 0)
before = is_plain(device)
layout = BlockLayout(SPECS["0.6b"].kv_groups(16, "bfloat16"))
cache = KVCache.allocate(layout, KvSlabs.of_blocks(layout, 4096), 0, device)
print(json.dumps([before, [is_readable(t.data_ptr(), open_driver()) for t in cache.tensors], is_plain(device)]))
"""


def run(variable: str, value: str, *command: str) -> subprocess.CompletedProcess[str]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environ = {name: text for name, text in os.environ.items() if name not in names} | {variable: value}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environ, timeout=DEADLINE_S)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("segments", [True, False])
def test_the_cache_is_apart_from_expandable_segments(variable: str, segments: bool) -> None:
    done = run(variable, f"expandable_segments:{segments}", "-c", CACHE)
    assert done.returncode == 0, done.stderr
    before, cache, after = json.loads(done.stdout.splitlines()[-1])
    assert (before, after) == (not segments, not segments), "the driver tells torch's own segments, before and after"
    assert cache
    assert all(cache)


@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="reads within one GPU are slow in any case")
def test_check_reads_at_the_speed_of_the_link() -> None:
    """Its transfer is of memory as a node's cache has it. Above 20 GB/s: mapped memory came at 0.5."""
    done = run(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "-m", "pd_cluster.launch.transfer_check", "read",
        "127.0.0.1", "",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["device"] == "cuda", result
    assert result["bytes"] / result["seconds"] > 20e9, result


@pytest.mark.timeout(400)
def test_a_node_starts_and_check_says_it() -> None:
    done = run("PYTORCH_ALLOC_CONF", "expandable_segments:True", "-m", "pd_cluster.launch.cli", "check", "--port=0")
    assert "allocated apart" in " ".join(done.stdout.replace("│", " ").split()), done.stdout + done.stderr
