"""What the engine process builds from a node's configuration. It runs in this process here."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pd_cluster.config import CacheConfig, HandoffConfig, SchedulerConfig
from pd_cluster.engine.process import _build
from tests.engine.test_core_pipeline import CONFIG, FakeMailbox
from tests.shallow_model import NUM_LAYERS

if TYPE_CHECKING:
    from pd_cluster.engine.ipc import EngineSockets

BLOCK_BYTES = 4 * NUM_LAYERS * 2 * 16 * 64 * 4  # KV heads, layers, K and V, tokens, head size, float32


def test_an_engine_tells_what_it_has_decided() -> None:
    """The configuration leaves all of it open."""
    cache = CacheConfig(kv_cache_gb=20.5 * BLOCK_BYTES / 1e9)
    config = replace(CONFIG, cache=cache, scheduler=SchedulerConfig(), handoff=HandoffConfig(connector="none"))
    with ExitStack() as cleanup:
        _, ready = _build(config, "", cast("EngineSockets", FakeMailbox()), cleanup)
    assert (ready.block_size, ready.num_blocks, ready.max_model_len, ready.max_num_seqs) == (16, 20, 20 * 16, 64)
