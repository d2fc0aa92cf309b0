"""What connectors with a pool promise beyond blocks: sharing, detection of damage, reports of misses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd_connectors.base import CachedBlock
from pd_connectors.head_parts import head_parts
from pd_connectors.store import HEADER_BYTES
from tests.conformance.harness import NUM_READER_BLOCKS, SIZE, End, Reader
from tests.conformance.pools import hashes_of
from tests.connectors.layouts import full_layout
from tests.connectors.remote_node import COMMANDS, LAYOUT, Node, context, stamp

if TYPE_CHECKING:
    from tests.conformance.pools import PoolHarness

KIND = "pool"
GROUPS = range(len(LAYOUT.groups))
pytestmark = pytest.mark.timeout(180)


def misses(reader: Reader) -> dict[str, float]:
    """Those that were counted, by reason."""
    prefix = "pool_misses_total|reason="
    stats = reader.node.connector.stats()
    return {name.removeprefix(prefix): n for name, n in stats.items() if name.startswith(prefix) and n}


def missed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {reason: n - before.get(reason, 0) for reason, n in after.items() if n != before.get(reason, 0)}


def test_hits_and_misses_are_counted(harness: PoolHarness, reader: Reader) -> None:
    prompt, before, hits = harness.prompt(4 * SIZE), misses(reader), "pool_hit_tokens_total"
    hits_before = reader.node.connector.stats()[hits]
    harness.offer(prompt, 3)
    assert harness.fetch(reader, prompt, harness.load_id("three"), (1, 2, 3, 4)) == End(3 * SIZE)
    reader.wipe()
    assert harness.fetch(reader, prompt, harness.load_id("fourth"), (4,), first_block=3) == End(0)
    assert missed(before, misses(reader)) == {"absent": 2}
    assert reader.node.connector.stats()[hits] - hits_before == 3 * SIZE


def test_a_flipped_bit_ends_the_prefix_before_it(harness: PoolHarness, reader: Reader) -> None:
    """Wherever it is; and the node that computes the block mends it."""
    prompt, before = harness.prompt(3 * SIZE), misses(reader)
    harness.offer(prompt)
    pool = reader.node.connector.pool
    assert pool is not None
    ((part, *_), *_) = head_parts(LAYOUT, 0)
    positions = (0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + part.num_bytes - 1)
    for position in positions:
        reader.wipe()
        harness.damage(prompt, 1, position)
        assert harness.fetch(reader, prompt, harness.load_id("damaged"), (8, 9, 10)) == End(SIZE)
        assert not bool(reader.node.cache.tensors[0][9:11].any()), "the damaged block was written"
        reader.named.add(4)
        stamp(reader.node.cache, 4, prompt.version, like=prompt.source_blocks[1])
        COMMANDS["store"](reader.node, tuple(CachedBlock(hashes_of(prompt, 2)[1], 4, group) for group in GROUPS))
    assert missed(before, misses(reader)) == {"damaged": len(positions)}
    reader.wipe()
    assert harness.fetch(reader, prompt, harness.load_id("mended"), (8, 9, 10)) == End(3 * SIZE)


def test_an_object_under_anothers_name_is_refused(harness: PoolHarness, reader: Reader) -> None:
    prompt, before = harness.prompt(2 * SIZE), misses(reader)
    harness.offer(prompt)
    first, second = harness.names(prompt)
    store = harness.open_store()
    assert store.put([(first, bytes(next(store.get([second])) or b""))]) == 1
    store.close()
    assert harness.fetch(reader, prompt, harness.load_id("swapped"), (8, 9)) == End(0)
    assert missed(before, misses(reader)) == {"damaged": 1}


def test_what_is_known_is_not_sent_again(harness: PoolHarness, reader: Reader) -> None:
    prompt = harness.prompt(2 * SIZE)
    harness.offer(prompt, 1)
    before = reader.node.connector.stats()
    COMMANDS["store"](
        reader.node, tuple(CachedBlock(block_hash, 0) for block_hash in hashes_of(prompt, 2))
    )  # of one group
    after = reader.node.connector.stats()
    assert after["pool_blocks_known_total"] - before["pool_blocks_known_total"] == 1
    assert after["pool_blocks_stored_total"] - before["pool_blocks_stored_total"] == 1


def test_tenants_share_nothing(harness: PoolHarness, reader: Reader) -> None:
    prompt = harness.prompt(2 * SIZE)
    harness.offer(prompt)
    pool, load_id = reader.node.connector.pool, harness.load_id("bob")
    assert pool is not None
    pool.find(load_id, hashes_of(prompt, 2, salt="bob"), (0,) * len(LAYOUT.groups))
    assert not reader.wait_found(load_id)
    assert reader.wait_end(load_id) == End(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "other weights"},
        {"layout": full_layout()},
        {"cluster_key": b"another cluster" * 2},
    ],
    ids=["fingerprint", "layout", "key"],
)
def test_nodes_with_different_kv_share_nothing(harness: PoolHarness, changes: dict[str, Any]) -> None:
    prompt = harness.prompt(2 * SIZE)
    harness.offer(prompt)
    settings = context("stranger", options=harness.options(), **changes)
    stranger = Reader(Node.start(harness.connector, settings, NUM_READER_BLOCKS))
    try:
        assert harness.fetch(stranger, prompt, harness.load_id("stranger"), (1, 2)) == End(0)
        assert misses(stranger) == {"absent": 1}
    finally:
        stranger.node.close()
