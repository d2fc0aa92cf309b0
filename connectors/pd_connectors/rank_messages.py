"""Messages between the transport of rank 0 and those of the engine's other ranks, over a RankPort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd_connectors.transport import Completion, Connected, ConnectFailed, GroupIds, PeerKey, ReadEnded, ReadId

if TYPE_CHECKING:
    from pd_connectors.transport import Transport


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Repeated until the rank has answered with Described."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """See Transport.connect. `peer` names the rank of the peer that the description is of."""

    peer: PeerKey
    description: bytes


class Read(msgspec.Struct, frozen=True, tag=True):
    """See Transport.read."""

    peer: PeerKey
    read_id: ReadId
    remote: GroupIds
    local: GroupIds


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """See Transport.disconnect."""

    peer: PeerKey


class Close(msgspec.Struct, frozen=True, tag=True):
    """See Transport.close."""

    deadline_s: float


class Described(msgspec.Struct, frozen=True, tag=True):
    """The rank's transport is up."""

    description: bytes


class Report(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What the rank's transport has completed."""

    connected: tuple[Connected, ...] = ()
    failed: tuple[ConnectFailed, ...] = ()
    ended: tuple[ReadEnded, ...] = ()

    @classmethod
    def of(cls, completions: list[Completion]) -> Report:
        """The report of these completions."""
        return cls(
            tuple(each for each in completions if isinstance(each, Connected)),
            tuple(each for each in completions if isinstance(each, ConnectFailed)),
            tuple(each for each in completions if isinstance(each, ReadEnded)),
        )


class Died(msgspec.Struct, frozen=True, tag=True):
    """The rank's transport has failed (a bug of ours): no read of it would ever end."""

    detail: str


Call = Connect | Read | Disconnect
ToRank = Describe | Connect | Read | Disconnect | Close
FromRank = Described | Report | Died

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def carry_out(call: Call, transport: Transport) -> None:
    """Make one call of a rank's transport."""
    match call:
        case Connect(peer, description):
            transport.connect(peer, description)
        case Read(peer, read_id, remote, local):
            transport.read(peer, read_id, remote, local)
        case Disconnect(peer):
            transport.disconnect(peer)
