"""The executor's phases in order, and how many blocks the cache has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.worker.kv_cache import blocks_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import CacheConfig
    from pd_cluster.worker.executor import Executor
    from pd_connectors.base import CacheDescription

MIN_BLOCKS = 2  # the first step copies a block


def run_phases(
    executor: Executor, config: CacheConfig, progress: Callable[[str], None]
) -> tuple[CacheDescription, ...]:
    """Take a new executor through its phases. -> the caches, by rank. `progress` receives a line per phase.

    When a phase fails, the executor is closed. Raises StartupError.
    """
    try:
        executor.load()
        num_blocks = _count_blocks(executor, config)
        progress(f"cache {num_blocks} blocks of {executor.block_size} tokens")
        caches = executor.allocate(num_blocks, blocks_in(config.swap_gb * 1e9, executor.layout))
        progress("warm-up")
        executor.warm_up()
    except BaseException:
        executor.close()
        raise
    return caches


def _count_blocks(executor: Executor, config: CacheConfig) -> int:
    num_blocks = config.num_blocks or blocks_in(executor.free_kv_bytes(), executor.layout)
    if num_blocks < MIN_BLOCKS:
        size_mb = executor.layout.block_bytes / 1e6
        raise StartupError(f"the KV cache has room for {num_blocks} blocks of {size_mb:.1f} MB; give it more memory")
    return num_blocks
