"""The id of an adapter in the salt separates whatever goes by the hash of a prompt: cache, ticket and pool."""

from __future__ import annotations

from pd_connectors.protocol.hashing import extend_hashes, prompt_digest, root_hash
from tests.scheduling.kv_groups import full_manager

SIZE = 16
TOKENS = list(range(100, 164))
SALTS = ("", "tenant", "adapter-1", "adapter-2")


def hashes(salt: str) -> list[bytes]:
    return extend_hashes(root_hash(salt), TOKENS, SIZE)


def test_no_hash_of_a_prompt_is_shared() -> None:
    """A pool is asked by these hashes, and D compares the digest with the one in P's ticket."""
    assert len({root_hash(salt) for salt in SALTS}) == len(SALTS)
    assert len({one for salt in SALTS for one in hashes(salt)}) == len(SALTS) * len(TOKENS) // SIZE
    assert len({prompt_digest(TOKENS, salt) for salt in SALTS}) == len(SALTS)
    assert len({prompt_digest(TOKENS[:3], salt) for salt in SALTS}) == len(SALTS), "a prompt without a whole block"


def test_the_cache_finds_the_blocks_of_its_own_adapter_alone() -> None:
    blocks = full_manager(16, SIZE)
    table = blocks.open_table()
    blocks.grow(table, 0, len(TOKENS))
    blocks.publish(table, hashes("adapter-1"))
    blocks.close(table)
    for salt in SALTS:
        found = blocks.open_table()
        assert blocks.match(found, hashes(salt)) == (len(TOKENS) // SIZE if salt == "adapter-1" else 0)
        blocks.close(found)
    blocks.forget_unused()
    blocks.check()
    assert blocks.stats().free == 16
