"""Control messages between a reader (D) and the owner of a lease (P).

Every message may be lost, repeated or reordered. P answers each `Renew` with a snapshot of the whole lease
(`LeaseState`) and pushes a snapshot after each change; `version` orders snapshots. `Confirm` changes nothing on P.

    D -> P   Hello, Renew, Confirm, Release
    P -> D   HelloReply, LeaseState, ConfirmReply
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

import msgspec

from pd_connectors.protocol.errors import BadSignature, LeaseEnd, ProtocolMismatch
from pd_connectors.protocol.layout import BlockLayout, BlockRun

PROTOCOL_VERSION = 3  # of tickets and control messages; both sides must have the same
MAC_BYTES = 16


class LeaseRef(msgspec.Struct, frozen=True):
    """Names one lease for ever: ids never repeat, and a restarted engine has another epoch."""

    engine_id: str
    epoch: int  # drawn at each boot of the engine process
    lease_id: str


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative at a position."""

    token_id: int
    logprob: float


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token. `logprob` and `top` are there when the request asked for logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """D introduces itself. P answers with `HelloReply`, also when the two do not match: D decides."""

    engine_id: str
    epoch: int
    fingerprint: str
    layout: BlockLayout
    nonce: bytes  # drawn for each greeting, so that a delayed answer of an earlier process is recognized


class HelloReply(msgspec.Struct, frozen=True, tag=True):
    """Which engine answers under this address, and how to reach its memory.

    A reader that asks for a lease of another epoch gets one too, with an empty nonce: that epoch's engine has ended.
    """

    engine_id: str
    epoch: int
    fingerprint: str
    layout: BlockLayout
    transport: bytes  # opaque to the protocol: the transport's own endpoint description
    checksum: bytes  # blake2b of `transport`: NIXL accepts metadata with a flipped byte
    nonce: bytes = b""  # of the Hello that it answers


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Keeps the lease alive and asks for its state. The first one attaches D to the lease."""

    lease: LeaseRef


class PrefillFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What P's prefill took, once its first tokens are known: for the client's usage, for traces and metrics."""

    seconds: float = 0.0  # from the request's arrival at P to its first tokens, by P's clock; 0: none yet, or unknown
    queue_s: float = 0.0  # of them, until the prompt was first scheduled
    num_cached_tokens: int = 0  # prompt tokens found in P's prefix cache


NO_PREFILL = PrefillFacts()


class LeaseState(msgspec.Struct, frozen=True, tag=True):
    """A snapshot of one lease."""

    lease: LeaseRef
    generation: int  # raised when P takes blocks back: everything read under an older one is void
    version: int  # raised at each change; orders snapshots across generations
    num_tokens_readable: int  # from the prompt's start; their KV is complete in `runs`
    runs: tuple[BlockRun, ...]  # P's blocks by group; () while nothing is readable. The last block may be partial
    first_tokens: tuple[SampledToken, ...] = ()  # one per sample; empty until sampled
    ended: LeaseEnd | None = None  # final, whatever `version` says
    ttl_s: float = 0.0  # the lease lives this long after a Renew; 0: it needs none yet
    is_begun: bool = False  # P computes and has all the blocks it needs: it will finish
    announced_at: float = 0.0  # Unix time of the last announcement; for measuring only
    prefill: PrefillFacts = NO_PREFILL
    is_frozen: bool = False  # no step of P ends, so no newer snapshot is to be expected soon


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """ "Were tokens [0, num_tokens) still the lease's under this generation until now?" Asked after the last read."""

    lease: LeaseRef
    generation: int
    num_tokens: int
    nonce: int  # drawn after the last read: a late answer to an earlier question must not vouch for later reads


class ConfirmReply(msgspec.Struct, frozen=True, tag=True):
    """The fence. Only `ok` lets D publish or compute on what it read."""

    lease: LeaseRef
    generation: int
    num_tokens: int
    nonce: int
    ok: bool


class Release(msgspec.Struct, frozen=True, tag=True):
    """This reader does not need the lease any more. `done`: the lease can end; else another D may still read it."""

    lease: LeaseRef
    done: bool


ToOwner = Hello | Renew | Confirm | Release
ToReader = HelloReply | LeaseState | ConfirmReply

_VERSION = PROTOCOL_VERSION.to_bytes(2, "big")
_DECODER = msgspec.msgpack.Decoder(ToOwner | ToReader)


def mac(key: bytes, payload: bytes) -> bytes:
    """Keyed blake2b (RFC 7693) over `payload`. `key` is at most 64 bytes."""
    return blake2b(payload, key=key, digest_size=MAC_BYTES, person=b"pd-cluster-mac").digest()


def seal(key: bytes, message: ToOwner | ToReader) -> bytes:
    """Version, signature, body. The version comes first so that a newer peer is refused, not misread."""
    body = msgspec.msgpack.encode(message)
    return _VERSION + mac(key, body) + body


def open_sealed(key: bytes, frame: bytes) -> ToOwner | ToReader:
    """The message inside `frame`.

    Raises ProtocolMismatch, BadSignature, or msgspec.MsgspecError for a signed body of the wrong shape.
    """
    if frame[:2] != _VERSION:
        raise ProtocolMismatch(f"peer speaks protocol {int.from_bytes(frame[:2], 'big')}, this node {PROTOCOL_VERSION}")
    body = frame[2 + MAC_BYTES :]
    if not hmac.compare_digest(mac(key, body), frame[2 : 2 + MAC_BYTES]):
        raise BadSignature("a control message was not signed with this cluster's key")
    try:
        message: ToOwner | ToReader = _DECODER.decode(body)
    except UnicodeDecodeError as error:  # msgspec lets it through, and it is none of its own errors
        raise msgspec.DecodeError(f"a text is not UTF-8: {error}") from error
    return message
