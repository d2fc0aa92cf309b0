"""Protocol version 2, frozen: the definitions with which a node of the release before wrote and read.

Nothing here follows the code, so that a change of the code cannot change it.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import TypeVar

import msgspec


class KVGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    block_size: int
    window: int = 0
    sharded: bool = True


class BlockLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: tuple[KVGroup, ...]
    tp_size: int = 1


class LeaseRef(msgspec.Struct, frozen=True):
    engine_id: str
    epoch: int
    lease_id: str


class Ticket(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    lease: LeaseRef
    generation: int
    expires_at_s: float
    fingerprint: str
    layout: BlockLayout
    prompt_digest: bytes
    num_tokens: int
    num_samples: int
    host: str
    port: int
    version: int = 2
    sampling_digest: bytes = b""


class Offer(msgspec.Struct, frozen=True, tag=True):
    prefill_urls: tuple[str, ...]
    expires_at_s: float
    version: int = 2


class NodeOrder(msgspec.Struct, frozen=True, tag=True):
    action: str
    node: str
    expires_at_s: float
    role: str = ""
    version: int = 2
    is_forced: bool = False
    reader: str = ""
    serial: int = 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    epoch: int
    fingerprint: str
    layout: BlockLayout
    nonce: bytes


class HelloReply(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    epoch: int
    fingerprint: str
    layout: BlockLayout
    transport: bytes
    checksum: bytes
    nonce: bytes = b""


LAYOUT = BlockLayout((KVGroup("full", (0, 1), (2, 2, 2, 16, 16), "float32", 16),))
TICKET = Ticket("r", LeaseRef("P", 1, "lease"), 0, 9e3, "f", LAYOUT, b"digest", 40, 1, "127.0.0.1", 1)
HELLO = Hello("D", 1, "f", LAYOUT, b"nonce")
REPLY = HelloReply("P", 1, "f", LAYOUT, b"there", b"sum", b"nonce")
T = TypeVar("T")


def _mac(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, key=key, digest_size=16, person=b"pd-cluster-mac").digest()


def sign(key: bytes, paper: msgspec.Struct) -> str:
    payload = msgspec.msgpack.encode(paper)
    return urlsafe_b64encode(_mac(key, payload) + payload).decode()


def read(key: bytes, token: str, kind: type[T]) -> T:
    """Raises msgspec.MsgspecError, which it took for a malformed ticket."""
    raw = urlsafe_b64decode(token.encode())
    assert hmac.compare_digest(raw[:16], _mac(key, raw[16:]))
    return msgspec.msgpack.decode(raw[16:], type=kind)


def seal(key: bytes, message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return b"\0\2" + _mac(key, body) + body


def is_opened(frame: bytes) -> bool:
    """Whether version 2 looks into a frame at all."""
    return frame[:2] == b"\0\2"
