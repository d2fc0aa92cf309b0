"""A node of the release before is refused by name, in both directions, and everything that it sent is counted."""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors import zmq_channel
from pd_connectors.channel import FromReader
from pd_connectors.protocol.errors import ProtocolMismatch, TicketError
from pd_connectors.protocol.messages import MAC_BYTES, Hello, HelloReply, LeaseRef, mac, open_sealed, seal
from pd_connectors.protocol.ticket import MAX_LIFETIME_S, NodeOrder, Offer, Ticket, sign, verify
from pd_connectors.zmq_channel import ZmqChannel
from tests.connectors import version_one
from tests.connectors.layouts import full_layout
from tests.deadlines import wait_until

if TYPE_CHECKING:
    from pd_connectors.protocol.messages import ToOwner, ToReader

KEY = b"k" * 32
OURS = full_layout(16, 2, 2, 16)


@pytest.mark.parametrize(
    ("old", "kind"),
    [
        (version_one.TICKET, Ticket),
        (version_one.Offer(("http://p:1",), 9e9), Offer),
        (version_one.NodeOrder("add", "http://p:1", 9e9, "prefill"), NodeOrder),
    ],
    ids=["ticket", "offer", "order"],
)
def test_a_paper_of_version_one_is_refused_by_name(old: msgspec.Struct, kind: type[Any]) -> None:
    words = f"the {kind.__name__.lower().removeprefix('node')} speaks protocol 1, this node 2: run the same release"
    with pytest.raises(ProtocolMismatch, match=words):
        verify(KEY, version_one.sign(KEY, old), kind, 0.0)


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


@pytest.mark.parametrize("old", [version_one.HELLO, version_one.REPLY], ids=["hello", "reply"])
def test_a_message_of_version_one_is_refused_by_name(old: msgspec.Struct) -> None:
    with pytest.raises(ProtocolMismatch, match="peer speaks protocol 1, this node 2"):
        open_sealed(KEY, version_one.seal(KEY, old))


@pytest.mark.parametrize("ours", [Hello("D", 1, "f", OURS, b"n"), HelloReply("P", 1, "f", OURS, b"", b"")])
def test_version_one_refuses_our_messages(ours: ToOwner | ToReader) -> None:
    assert not version_one.is_opened(seal(KEY, ours))


def test_a_node_of_version_one_at_the_control_port_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of its greetings, a warning: a rolling upgrade must not flood the log."""
    with closing(ZmqChannel(KEY, "127.0.0.1", 0)) as owner, closing(ZmqChannel(KEY, "127.0.0.1", 0)) as reader:
        old, new = version_one.seal(KEY, version_one.HELLO), Hello("D", 1, "f", OURS, b"n")
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
    assert caplog.text.count("peer speaks protocol 1, this node 2: run the same release") == 1
