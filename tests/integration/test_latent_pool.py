"""A model with latent attention behind a pool that outlives its nodes: new nodes take whole prompts' blocks from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.connectors.store_server import needs_lmcache
from tests.deadlines import HANG_S
from tests.integration import test_window_pool as pool
from tests.integration.number_model import save_tokenizer, token_ids
from tests.integration.system import running_system
from tests.worker.conftest import ModelStore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_BYTES = 3 * pool.SIZE * (24 + 8) * 4  # of three layers, in float32
PROMPTS = {  # in this order, and the blocks that an empty node takes which has served those before
    "long": (pool.LONG, 12),
    "shares a beginning": (pool.LONG[:144] + pool.TAIL, 3),
    "two blocks": (pool.SHORT, 1),
    "less than a block": (pool.SHORT[-5:], 0),
}


@needs_lmcache
def test_new_nodes_take_prompts_from_the_pool(tmp_path: Path) -> None:
    saved = ModelStore(tmp_path).get("moonlight")
    save_tokenizer(saved.directory)
    expected = {name: saved.generate(prompt, pool.NUM_TOKENS) for name, (prompt, _) in PROMPTS.items()}
    sizes = (f"--block-size={pool.SIZE}", f"--min-remote-tokens={pool.TOO_LITTLE}", "--max-num-batched-tokens=64")
    with pool.lmcache() as flags:
        nodes = (f"--model={saved.directory}", *sizes, f"--pool-deadline-s={HANG_S}", *flags)
        with running_system(*nodes) as system:
            for path in pool.ROUTES:
                for name, (prompt, _) in PROMPTS.items():
                    assert token_ids(pool.ask(system, path, prompt)) == expected[name], (path, name)
            for node in system.urls:
                pool.settled(system, node)
        with running_system(*nodes) as system:
            for path in pool.ROUTES:
                for name, (prompt, num_blocks) in PROMPTS.items():
                    node = pool.PREFILLERS[path]
                    before = pool.settled(system, node)
                    assert token_ids(pool.ask(system, path, prompt)) == expected[name], (path, name)
                    found = pool.changes(before, pool.settled(system, node), pool.HITS, pool.READ, pool.STORED)
                    assert found == [num_blocks * pool.SIZE, num_blocks * BLOCK_BYTES, 0], (path, name)
