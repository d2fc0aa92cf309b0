"""What the engine process builds from a node's configuration. It runs in this process here."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pd_cluster.config import CacheConfig, HandoffConfig, SchedulerConfig
from pd_cluster.engine.process import _build
from tests.engine.test_core_pipeline import CONFIG, FakeMailbox
from tests.shallow_model import NUM_LAYERS, shallow_model

BLOCK_BYTES = 4 * NUM_LAYERS * 2 * 16 * 64 * 4  # KV heads, layers, K and V, tokens, head size, float32


def test_an_engine_tells_what_it_has_decided() -> None:
    """The configuration leaves all of it open."""
    cache = CacheConfig(kv_cache_gb=20.5 * BLOCK_BYTES / 1e9)
    config = replace(CONFIG, cache=cache, scheduler=SchedulerConfig(), handoff=HandoffConfig(connector="none"))
    with ExitStack() as cleanup:
        _, ready = _build(config, "", FakeMailbox(), cleanup)
    assert (ready.block_size, ready.num_blocks, ready.max_model_len, ready.max_num_seqs) == (16, 20, 20 * 16, 8)


def test_an_engine_tells_blocks_that_a_sequence_can_have_in_all_groups(tmp_path: Path) -> None:
    """Layers with and without a window share the memory. Each slab has more units than blocks of both."""
    for path in Path(shallow_model()).iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    told = json.loads((tmp_path / "config.json").read_text())
    told |= {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 32}
    (tmp_path / "config.json").write_text(json.dumps(told))
    model, cache = replace(CONFIG.model, model=str(tmp_path)), CacheConfig(num_blocks=20, block_size=16)
    config = replace(CONFIG, model=model, cache=cache, handoff=HandoffConfig(connector="none"))
    with ExitStack() as cleanup:
        core, ready = _build(config, "", FakeMailbox(), cleanup)
        assert len(core._blocks.pools) == 2
        assert core._blocks.num_blocks == 40, "units"
    assert (ready.block_size, ready.num_blocks) == (16, 20)
