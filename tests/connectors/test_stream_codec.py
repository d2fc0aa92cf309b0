"""Messages survive any cut of their bytes; anything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.feed import FeedDelta, FeedMessage, FeedSnapshot, NodeLoad, StoredBlock
from pd_connectors.protocol.stream_codec import StreamParser, encode_message

MESSAGES = [
    FeedSnapshot(3, 1, NodeLoad(5, num_slots=2, step_s=0.5), (StoredBlock((1 << 64) - 1, 7, 64),), (1, 2)),
    FeedDelta(2, NodeLoad(), evicted=(9,)),
    FeedDelta(3, NodeLoad(), charges=(4,)),
]


@pytest.mark.long
@given(st.lists(st.integers(1, 200), max_size=20))
def test_any_cut_gives_the_same_messages(cuts: list[int]) -> None:
    data = b"".join(map(encode_message, MESSAGES))
    parser = StreamParser[FeedMessage](FeedMessage)
    found: list[FeedMessage] = []
    for cut in cuts:
        piece, data = data[:cut], data[cut:]
        found += parser.feed(piece)
    found += parser.feed(data)
    assert found == MESSAGES
    assert parser.num_pending_bytes == 0


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", encode_message(NodeLoad()), b"\0\0\0\1\xc1"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        StreamParser[FeedMessage](FeedMessage).feed(data)
