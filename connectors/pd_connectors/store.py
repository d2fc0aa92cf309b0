"""The key-value store under a pool, and the objects in it.

One object is some heads of one group of one whole KV block (`head_parts`). Its *name* is its content's: fingerprint and
layout (together the scope), the chained hash of all tokens up to the block's end (`protocol.hashing`, the tenant's salt
in the root), the group's number and the part's. How many ranks an engine has is not in it. So equal names mean equal
bytes, any node may write any object at any time, and no object is ever invalidated.

    object   magic (16)   digest (16)   the heads' bytes of the block, as they lie in the cache

The digest is keyed with the cluster's key and covers the name. So a damaged object, another object under this name and
an object that a process without the key wrote are all refused: the store is not trusted with the content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import TYPE_CHECKING

from pd_connectors.head_parts import head_parts
from pd_connectors.protocol.errors import HandoffError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pd_connectors.base import ConnectorContext

OBJECT_MAGIC = b"pd-kv-object/2\0\0"  # the format's; it is part of the scope too
DIGEST_BYTES = 16
HEADER_BYTES = len(OBJECT_MAGIC) + DIGEST_BYTES


class StoreUnavailable(HandoffError):
    """The store's server cannot be reached, has gone, or does not answer in time."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The name of one object in the store."""

    scope: str  # hex; different for any two nodes with KV of another meaning, layout or key
    hash: bytes  # of the prompt up to the block's end
    group: int = 0  # index into `BlockLayout.groups`
    part: int = 0  # HeadPart.number

    @property
    def space(self) -> str:
        """The name without the hash."""
        return f"pd-{self.scope}-{self.group}-{self.part}"

    def __str__(self) -> str:
        return f"{self.space}-{self.hash.hex()}"


class KVStore(ABC):
    """A client of the store. Not thread-safe; each thread opens its own.

    Connects when it is first used, and again after it has failed. Every method may raise StoreUnavailable, within a
    deadline of the implementation's; a longer one than a search's is bridged by the pool.
    """

    @abstractmethod
    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Whether each object is stored now. A stored object may be evicted at any time."""

    def contains_all(self, blocks: Sequence[Sequence[ObjectName]]) -> list[bool]:
        """Whether all objects of each block are stored. If a block's first one is missing, no other is asked for."""
        there = self.contains([block[0] for block in blocks])
        others = [name for block, is_there in zip(blocks, there, strict=True) if is_there for name in block[1:]]
        known = dict(zip(others, self.contains(others) if others else (), strict=True))
        return [is_there and all(map(known.get, block[1:])) for block, is_there in zip(blocks, there, strict=True)]

    @abstractmethod
    def get(self, names: Sequence[ObjectName]) -> Generator[bytearray | None, None, None]:
        """Yield each object in the order of `names`; None for an object that is not stored.

        A caller that stops before the last object must close the generator.
        """

    @abstractmethod
    def put(self, objects: Sequence[tuple[ObjectName, bytes]]) -> int:
        """Store the objects. An object replaces the stored one of the same name.

        An object becomes visible when it is whole. Returns how many of the objects are visible now.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class Seal:
    """Keyed digests of one kind of object, which `magic` (16 bytes) names.

    scope: hex; different for any two nodes with KV of another meaning, layout, key or `more`.
    """

    def __init__(self, magic: bytes, context: ConnectorContext, *more: bytes) -> None:
        self._magic, self._key = magic, context.cluster_key
        scope = blake2b(digest_size=16, person=b"pd-pool-scope")
        key_id = blake2b(context.cluster_key, digest_size=16, person=b"pd-pool-key-id").digest()
        for field in (magic, context.fingerprint.encode(), context.layout.digest(), key_id, *more):
            scope.update(len(field).to_bytes(8, "little") + field)
        self.scope = scope.hexdigest()

    def header(self, name: str, content: memoryview) -> bytes:
        """HEADER_BYTES that stand before this content of the object `name`."""
        digest = blake2b(digest_size=DIGEST_BYTES, key=self._key, person=b"pd-pool-object")
        digest.update(name.encode())
        digest.update(content)
        return self._magic + digest.digest()

    def is_of(self, header: memoryview, name: str, content: memoryview) -> bool:
        """Whether a node of this cluster sealed exactly this content as `name`."""
        return header[: len(self._magic)] == self._magic and compare_digest(header, self.header(name, content))


class Sealer:
    """Names, seals and opens the objects of one rank. `parts` are those of each block, by group.

    Raises ConnectorUnavailable when the rank would hold a fraction of an object.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self.parts = head_parts(context.layout, context.rank)
        self._seal = Seal(OBJECT_MAGIC, context)

    def names(self, block_hash: bytes, group: int = 0) -> list[ObjectName]:
        """The objects, in the order of `parts`, of the group's block that this chained hash names."""
        return [ObjectName(self._seal.scope, block_hash, group, part.number) for part in self.parts[group]]

    def seal(self, name: ObjectName, block: memoryview) -> bytes:
        """The object that holds `block` (its bytes)."""
        return b"".join((self._seal.header(str(name), block), block))

    def open(self, name: ObjectName, sealed: bytearray) -> memoryview | None:
        """The block's bytes; None unless a node of this cluster sealed exactly this object as `name`."""
        view = memoryview(sealed)
        if len(view) != HEADER_BYTES + self.parts[name.group][0].num_bytes:  # all parts of a group are of one size
            return None
        block = view[HEADER_BYTES:]
        return block if self._seal.is_of(view[:HEADER_BYTES], str(name), block) else None
