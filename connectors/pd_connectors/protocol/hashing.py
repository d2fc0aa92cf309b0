"""Chained hashes that name KV blocks by content.

A block's hash covers its tokens and everything before them, so equal hashes mean equal KV (given equal fingerprints).
Chains run over fixed units of `HASH_UNIT_TOKENS` tokens: nodes with different block sizes (multiples of the unit)
agree on every hash. A unit with placeholders of media covers the media, too. blake2b, never Python's `hash`: a
collision would hand one user's KV to another.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HASH_UNIT_TOKENS = 16
DIGEST_BYTES = 16
NO_MEDIA: Mapping[int, bytes] = MappingProxyType({})
_TOKEN_BYTES = 4
_MEDIA_UNIT = blake2b(digest_size=DIGEST_BYTES, person=b"pd-kv-media")
_UNIT = blake2b(digest_size=DIGEST_BYTES, person=b"pd-kv-unit")  # copied for every unit: half the time of a new one


def root_hash(salt: str = "") -> bytes:
    """The parent of a prompt's first unit. `salt` separates tenants that must not share a cache."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"pd-kv-root").digest()


def _chain(parent: bytes, tokens: bytes, media: bytes) -> bytes:
    state = (_MEDIA_UNIT if media else _UNIT).copy()
    state.update(parent + media + tokens)
    return state.digest()


def extend_hashes(
    parent: bytes, token_ids: Sequence[int], block_size: int, media: Mapping[int, bytes] = NO_MEDIA
) -> list[bytes]:
    """One hash per *whole* block of `token_ids` (each 0 <= id < 2**32); the tail is left out.

    `parent` is the hash of what precedes `token_ids` (`root_hash()` at the start of a prompt). `media`: by the number
    of the unit within `token_ids`, a digest of DIGEST_BYTES of the media that have placeholders in it.
    """
    if block_size % HASH_UNIT_TOKENS:
        raise ValueError(f"block_size {block_size} is not a multiple of {HASH_UNIT_TOKENS}")
    tokens, unit_bytes, hashes = array("I", token_ids).tobytes(), HASH_UNIT_TOKENS * _TOKEN_BYTES, []
    block_bytes = block_size * _TOKEN_BYTES
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        for start in range(end - block_bytes, end, unit_bytes):
            parent = _chain(parent, tokens[start : start + unit_bytes], media.get(start // unit_bytes, b""))
        hashes.append(parent)
    return hashes


def prompt_digest(token_ids: Sequence[int], salt: str = "", media: Mapping[int, bytes] = NO_MEDIA) -> bytes:
    """Hash of a whole prompt, tail included. Two nodes compare it before one reads the other's KV.

    media: as for `extend_hashes`. The tail is the last unit.
    """
    units = extend_hashes(root_hash(salt), token_ids, HASH_UNIT_TOKENS, media)
    tail = token_ids[len(units) * HASH_UNIT_TOKENS :]
    return _chain(units[-1] if units else root_hash(salt), array("I", tail).tobytes(), media.get(len(units), b""))
