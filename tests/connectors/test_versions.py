"""A node of the release before is refused by name, in both directions, and everything that it sent is counted."""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import closing
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors import zmq_channel
from pd_connectors.channel import FromReader
from pd_connectors.handshake import check_ticket
from pd_connectors.protocol.errors import HandshakeError, ProtocolMismatch, TicketError
from pd_connectors.protocol.messages import (
    MAC_BYTES,
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    LeaseRef,
    mac,
    open_sealed,
    seal,
)
from pd_connectors.protocol.ticket import MAX_LIFETIME_S, STATEMENT_VERSION, NodeOrder, Offer, Ticket, sign, verify
from pd_connectors.zmq_channel import ZmqChannel
from tests.connectors import version_one, version_two
from tests.connectors.layouts import full_layout
from tests.deadlines import wait_until

if TYPE_CHECKING:
    from pd_connectors.protocol.messages import ToOwner, ToReader

KEY = b"k" * 32
OURS = full_layout(16, 2, 2, 16)


@pytest.mark.parametrize(
    ("old", "kind", "ours"),
    [
        (version_one.TICKET, Ticket, PROTOCOL_VERSION),
        (version_one.Offer(("http://p:1",), 9e9), Offer, STATEMENT_VERSION),
        (version_one.NodeOrder("add", "http://p:1", 9e9, "prefill"), NodeOrder, STATEMENT_VERSION),
    ],
    ids=["ticket", "offer", "order"],
)
def test_a_paper_of_version_one_is_refused_by_name(old: msgspec.Struct, kind: type[Any], ours: int) -> None:
    words = f"the {kind.__name__.lower().removeprefix('node')} speaks protocol 1, this node {ours}: run the same rel"
    with pytest.raises(ProtocolMismatch, match=words):
        verify(KEY, version_one.sign(KEY, old), kind, 0.0)


def test_a_ticket_of_version_two_is_refused_by_name() -> None:
    token = version_two.sign(KEY, version_two.TICKET)
    with pytest.raises(ProtocolMismatch, match="the ticket speaks protocol 2, this node 3: run the same release"):
        verify(KEY, token, Ticket, 0.0)


def test_version_two_refuses_our_ticket() -> None:
    ticket = Ticket("r", LeaseRef("P", 1, "lease"), 0, 9e3, "f", OURS, b"d", 40, 1, "h", 1)
    with pytest.raises(msgspec.ValidationError, match="optional"):
        version_two.read(KEY, sign(KEY, ticket), version_two.Ticket)


def test_offers_and_orders_are_those_of_version_two() -> None:
    """So a router, or a command, of one release serves nodes of both while they are upgraded.

    Orders have fields more, which version two does not read: it obeys an order that names what its sender saw, whatever
    has changed.
    """
    assert sign(KEY, Offer(("u",), 9e3)) == version_two.sign(KEY, version_two.Offer(("u",), 9e3))
    seen = NodeOrder("role", "n", 9e3, "decode", sender="balance", reason="streams wait", seen_changes=3, seen_state=4)
    pairs: list[tuple[Any, Any]] = [
        (Offer(("http://p:1",), 9e3), version_two.Offer(("http://p:1",), 9e3)),
        (
            NodeOrder("feed", "n", 9e3, reader="r", serial=3),
            version_two.NodeOrder("feed", "n", 9e3, "", 2, False, "r", 3),
        ),
    ]
    assert version_two.read(KEY, sign(KEY, seen), version_two.NodeOrder).role == "decode"
    for ours, theirs in pairs:
        assert version_two.read(KEY, sign(KEY, ours), type(theirs)) == theirs
        assert verify(KEY, version_two.sign(KEY, theirs), type(ours), 0.0) == ours


def test_the_digest_of_a_layout_is_that_of_version_two() -> None:
    """So a pool's objects stay readable."""
    packed = msgspec.msgpack.encode(version_two.LAYOUT.groups)
    assert OURS.digest() == blake2b(packed, digest_size=16, person=b"pd-kv-layout").digest()


def test_a_ticket_with_media_that_shift_positions_is_refused() -> None:
    ticket = Ticket("r", LeaseRef("P", 1, "lease"), 0, 9e3, "f", OURS, b"d", 40, 1, "h", 1)
    check_ticket(ticket, "f", OURS)
    with pytest.raises(HandshakeError, match="shift its positions by -3: this node decodes prompts of text"):
        check_ticket(msgspec.structs.replace(ticket, position_delta=-3), "f", OURS)


def test_version_one_refuses_our_ticket() -> None:
    ticket = Ticket("r", LeaseRef("P", 1, "lease"), 0, 9e3, "f", OURS, b"d", 40, 1, "h", 1)
    assert verify(KEY, sign(KEY, ticket), Ticket, 0.0) == ticket
    with pytest.raises(msgspec.ValidationError, match="geometry"):
        version_one.read_ticket(KEY, sign(KEY, ticket))


class _OrderBefore(msgspec.Struct, frozen=True, tag="NodeOrder"):
    """As the release before has it: no order names its reader."""

    action: str
    node: str
    expires_at_s: float
    role: str = ""
    version: int = 2
    is_forced: bool = False


def test_orders_of_a_feed_and_those_of_the_release_before_are_read_by_each_other() -> None:
    ours = NodeOrder("feed", "n", 9e3, reader="r", serial=3)
    payload = urlsafe_b64decode(sign(KEY, ours))[MAC_BYTES:]
    assert msgspec.msgpack.decode(payload, type=_OrderBefore) == _OrderBefore("feed", "n", 9e3)
    before = msgspec.msgpack.encode(_OrderBefore("feed", "n", 9e3))
    token = urlsafe_b64encode(mac(KEY, before) + before).decode()
    assert verify(KEY, token, NodeOrder, 0.0) == NodeOrder("feed", "n", 9e3)


@pytest.mark.parametrize("expires_at_s", [math.nan, math.inf, MAX_LIFETIME_S + 2.0])
def test_no_paper_is_valid_for_ever(expires_at_s: float) -> None:
    papers: list[Any] = [
        NodeOrder("feed", "n", expires_at_s),
        Offer(("http://p:1",), expires_at_s),
        Ticket("r", LeaseRef("P", 1, "lease"), 0, expires_at_s, "f", OURS, b"d", 40, 1, "h", 1),
    ]
    for paper in papers:
        with pytest.raises(TicketError, match="or never"):
            verify(KEY, sign(KEY, paper), type(paper), 1.0)
        longest = msgspec.structs.replace(paper, expires_at_s=MAX_LIFETIME_S)
        assert verify(KEY, sign(KEY, longest), type(paper), 1.0) == longest


@pytest.mark.parametrize("which", ["HELLO", "REPLY"])
@pytest.mark.parametrize(("number", "version"), [(1, version_one), (2, version_two)])
def test_a_message_of_another_version_is_refused_by_name(number: int, version: Any, which: str) -> None:
    with pytest.raises(ProtocolMismatch, match=f"peer speaks protocol {number}, this node 3"):
        open_sealed(KEY, version.seal(KEY, getattr(version, which)))


@pytest.mark.parametrize("ours", [Hello("D", 1, "f", OURS, b"n"), HelloReply("P", 1, "f", OURS, b"", b"")])
def test_other_versions_refuse_our_messages(ours: ToOwner | ToReader) -> None:
    assert not version_one.is_opened(seal(KEY, ours))
    assert not version_two.is_opened(seal(KEY, ours))


@pytest.mark.parametrize(("number", "version"), [(1, version_one), (2, version_two)])
def test_a_node_of_another_version_at_the_control_port_is_counted_and_named(
    number: int, version: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of its greetings, a warning: a rolling upgrade must not flood the log."""
    with closing(ZmqChannel(KEY, "127.0.0.1", 0)) as owner, closing(ZmqChannel(KEY, "127.0.0.1", 0)) as reader:
        old, new = version.seal(KEY, version.HELLO), Hello("D", 1, "f", OURS, b"n")
        frames = iter([old, old, seal(KEY, new)])
        monkeypatch.setattr(zmq_channel, "seal", lambda key, message: next(frames))
        for _ in range(3):
            reader.ask(("127.0.0.1", owner.port), new)
        heard: list[object] = []

        def hear() -> bool:
            heard.extend(item.message for item in owner.receive() if isinstance(item, FromReader))
            return bool(heard)

        wait_until(hear, owner.stats)
        assert heard == [new], "what follows is heard"
        stats = owner.stats()
    assert (stats["protocol_mismatches_total"], stats["bad_frames_total"]) == (2, 2)
    assert caplog.text.count(f"peer speaks protocol {number}, this node 3: run the same release") == 1
