"""Protocol version 1, frozen: the definitions with which a node of the release before wrote and read.

Nothing here follows the code, so that a change of the code cannot change it.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b

import msgspec


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_size: int
    num_kv_heads: int
    num_layers: int
    head_dim: int
    dtype: str
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
    geometry: Geometry
    prompt_digest: bytes
    num_tokens: int
    num_samples: int
    host: str
    port: int
    version: int = 1
    sampling_digest: bytes = b""


class Offer(msgspec.Struct, frozen=True, tag=True):
    prefill_urls: tuple[str, ...]
    expires_at_s: float
    version: int = 1


class NodeOrder(msgspec.Struct, frozen=True, tag=True):
    action: str
    node: str
    expires_at_s: float
    role: str = ""
    version: int = 1


class Hello(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    epoch: int
    fingerprint: str
    geometry: Geometry
    nonce: bytes


class HelloReply(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    epoch: int
    fingerprint: str
    geometry: Geometry
    transport: bytes
    checksum: bytes
    nonce: bytes = b""


GEOMETRY = Geometry(16, 2, 2, 16, "float32")
TICKET = Ticket("r", LeaseRef("P", 1, "lease"), 0, 9e9, "f", GEOMETRY, b"digest", 40, 1, "127.0.0.1", 1)
HELLO = Hello("D", 1, "f", GEOMETRY, b"nonce")
REPLY = HelloReply("P", 1, "f", GEOMETRY, b"there", b"sum", b"nonce")


def _mac(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, key=key, digest_size=16, person=b"pd-cluster-mac").digest()


def sign(key: bytes, paper: msgspec.Struct) -> str:
    payload = msgspec.msgpack.encode(paper)
    return urlsafe_b64encode(_mac(key, payload) + payload).decode()


def read_ticket(key: bytes, token: str) -> Ticket:
    """Raises msgspec.MsgspecError, which version 1 took for a malformed ticket."""
    raw = urlsafe_b64decode(token.encode())
    assert hmac.compare_digest(raw[:16], _mac(key, raw[16:]))
    return msgspec.msgpack.decode(raw[16:], type=Ticket)


def seal(key: bytes, message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return b"\0\1" + _mac(key, body) + body


def is_opened(frame: bytes) -> bool:
    """Whether version 1 looks into a frame at all."""
    return frame[:2] == b"\0\1"
