"""Hashes name the same content on every node, so they are part of the protocol: here they are made by hand."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest

from pd_connectors.protocol.hashing import HASH_UNIT_TOKENS, extend_hashes, prompt_digest, root_hash

TOKENS = [(index * 40503) % 151_936 for index in range(5 * HASH_UNIT_TOKENS + 3)]


def chain(parent: bytes, tokens: list[int], media: bytes = b"") -> bytes:
    packed = parent + media + struct.pack(f"={len(tokens)}I", *tokens)
    return blake2b(packed, digest_size=16, person=b"pd-kv-media" if media else b"pd-kv-unit").digest()


def test_blocks_of_any_size_are_named_by_a_chain_over_units() -> None:
    units, parent = [], root_hash("tenant")
    for start in range(0, 5 * HASH_UNIT_TOKENS, HASH_UNIT_TOKENS):
        parent = chain(parent, TOKENS[start : start + HASH_UNIT_TOKENS])
        units.append(parent)
    assert extend_hashes(root_hash("tenant"), TOKENS, HASH_UNIT_TOKENS) == units
    assert extend_hashes(root_hash("tenant"), TOKENS, 2 * HASH_UNIT_TOKENS) == [units[1], units[3]]
    assert extend_hashes(units[0], TOKENS[HASH_UNIT_TOKENS:], 4 * HASH_UNIT_TOKENS) == [units[4]]
    assert extend_hashes(root_hash("tenant"), TOKENS[: HASH_UNIT_TOKENS - 1], HASH_UNIT_TOKENS) == []
    assert prompt_digest(TOKENS, "tenant") == chain(units[4], TOKENS[-3:])
    assert prompt_digest([], "tenant") == chain(root_hash("tenant"), [])


def test_blocks_are_whole_units() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        extend_hashes(root_hash(), TOKENS, HASH_UNIT_TOKENS + 1)


def test_media_name_the_units_in_which_they_lie() -> None:
    """A chain without media is the chain of before; one with media differs from the first unit of theirs on."""
    media = {1: b"m" * 16}
    plain, shown = (extend_hashes(root_hash(), TOKENS, HASH_UNIT_TOKENS, given) for given in ({}, media))
    assert extend_hashes(root_hash(), TOKENS, HASH_UNIT_TOKENS) == plain
    assert shown[0] == plain[0]
    assert not set(shown[1:]) & set(plain[1:])
    assert extend_hashes(root_hash(), TOKENS, 2 * HASH_UNIT_TOKENS, media) == [shown[1], shown[3]]
    assert shown != extend_hashes(root_hash(), TOKENS, HASH_UNIT_TOKENS, {1: b"n" * 16})
    assert prompt_digest(TOKENS, media=media) == chain(shown[4], TOKENS[-3:])
    assert prompt_digest(TOKENS, media={5: b"m" * 16}) == chain(plain[4], TOKENS[-3:], b"m" * 16)
    assert prompt_digest(TOKENS, media={5: b"m" * 16}) != prompt_digest(TOKENS)
