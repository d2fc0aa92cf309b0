"""A node of the release before is refused by name, in both directions, and everything that it sent is counted."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors import zmq_channel
from pd_connectors.channel import FromReader
from pd_connectors.protocol.errors import ProtocolMismatch
from pd_connectors.protocol.messages import Hello, HelloReply, LeaseRef, open_sealed, seal
from pd_connectors.protocol.ticket import NodeOrder, Offer, Ticket, sign, verify
from pd_connectors.zmq_channel import ZmqChannel
from tests.connectors import version_one
from tests.connectors.layouts import full_layout

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
    ticket = Ticket("r", LeaseRef("P", 1, "lease"), 0, 9e9, "f", OURS, b"d", 40, 1, "h", 1)
    assert verify(KEY, sign(KEY, ticket), Ticket, 0.0) == ticket
    with pytest.raises(msgspec.ValidationError, match="geometry"):
        version_one.read_ticket(KEY, sign(KEY, ticket))


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
        heard = []
        for _ in range(100):
            heard += [item.message for item in owner.receive() if isinstance(item, FromReader)]
            if heard:
                break
            owner.wait(0.1)
        assert heard == [new], "what follows is heard"
        stats = owner.stats()
    assert (stats["protocol_mismatches_total"], stats["bad_frames_total"]) == (2, 2)
    assert caplog.text.count("peer speaks protocol 1, this node 2: run the same release") == 1
