"""A further rank's reader as its process closes it: after that the rank's cache may be freed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pd_connectors.rank_messages import Disconnect, encode
from pd_connectors.rank_reader import RankReader
from pd_connectors.transport import PeerKey
from tests.connectors.layouts import full_layout, make_cache
from tests.connectors.rank_wires import PortPair
from tests.connectors.test_ranked_transport import ScriptedTransport
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from pd_connectors.transport import Completion

ORDER = encode(Disconnect(PeerKey(("there", 1), "P", 1, 1)))


class HeldTransport(ScriptedTransport):
    """Stands in `poll`, as one that copies a block does, until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.is_polled, self.goes_on = threading.Event(), threading.Event()

    def poll(self) -> list[Completion]:
        self.is_polled.set()
        assert self.goes_on.wait(HANG_S)
        self.calls.append("poll")
        return []

    def close(self, deadline_s: float) -> None:
        self.calls.append("close")


def test_closing_waits_for_the_call_under_way_and_none_follows() -> None:
    pair, transport = PortPair(), HeldTransport()
    reader = RankReader(transport, pair.rank)
    reader.open(make_cache(full_layout(), 2))
    pair.zero.set_handler(lambda message: None)
    pair.zero.send(ORDER)
    assert transport.is_polled.wait(HANG_S)
    is_closed = threading.Event()

    def close() -> None:
        reader.close()
        is_closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    assert not is_closed.wait(0.05), "a block may still land"
    transport.goes_on.set()
    closing.join(HANG_S)
    assert transport.calls == ["poll", "close"]
    pair.zero.send(ORDER)
    reader.close()
    pair.close()
    assert transport.calls == ["poll", "close"]
