"""The control port's keys. A process that lacks the cluster's key gets no further than ZeroMQ's handshake.

CURVE (RFC 26, Curve25519) encrypts and authenticates every connection. The owner's key pair is derived from the
cluster's key, so its public half never travels: a client that does not know it cannot form the handshake's first
message, and none of the handshake's messages contains it. Knowing that half is what makes a peer a member of the
cluster; a client's own key pair proves nothing more and is drawn afresh. Every message is sealed besides
(protocol/messages.py).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from typing import Any

_DOMAIN = b"pd-control-curve"  # other uses of the cluster's key have other ones


class CurveKeys:
    """The owner's key pair, as Z85 text. Raises ConnectorUnavailable when this ZeroMQ was built without CURVE."""

    __slots__ = ("_secret", "public")

    def __init__(self, cluster_key: bytes) -> None:
        require_curve()
        seed = bytearray(blake2b(cluster_key, digest_size=32, person=_DOMAIN).digest())
        seed[0] &= 248  # X25519's form of a secret key (RFC 7748, section 5)
        seed[31] = seed[31] & 127 | 64
        self._secret: bytes = z85.encode(bytes(seed))
        self.public: bytes = zmq.curve_public(self._secret)

    def serve(self, sock: zmq.Socket[Any]) -> None:
        """Let `sock`, before it is bound, accept only peers that know the public key."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def ask(self, sock: zmq.Socket[Any]) -> None:
        """Let `sock`, before it connects, talk to nothing but an owner that has the secret key."""
        public, secret = zmq.curve_keypair()
        sock.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def __repr__(self) -> str:
        return "CurveKeys()"


def require_curve() -> None:
    """Raises ConnectorUnavailable when this ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConnectorUnavailable(
            "the installed ZeroMQ was built without CURVE, which protects the control port: install pyzmq's own wheel, "
            "or build libzmq with libsodium"
        )
