"""Answers that leave in pieces: the same JSON, and no piece before the client has taken the one before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_http import reply as replies
from pd_http.held_bytes import HeldBytes, Share
from pd_http.json_pieces import JsonList, json_pieces
from pd_http.reply import PIECE_BYTES, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def in_lists(value: Any, rng: Any) -> Any:
    """`value` with some of its lists as JsonLists: of objects, or of items as JSON."""
    if isinstance(value, dict):
        return {name: in_lists(one, rng) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    inner = [in_lists(one, rng) for one in value]
    if rng.random() < 0.3 or not all(isinstance(one, dict) for one in inner):
        cut = rng.randrange(len(value) + 1)
        parts = [orjson.dumps(value[:cut])[1:-1], orjson.dumps(value[cut:])[1:-1]]
        return JsonList(parts) if rng.random() < 0.8 else inner
    return JsonList(iter(inner))


@pytest.mark.long
@settings(max_examples=50)
@given(PLAIN, st.randoms(use_true_random=False))
def test_pieces_are_the_same_json(value: Any, rng: Any) -> None:
    assert b"".join(json_pieces(in_lists(value, rng))) == orjson.dumps(value)


@pytest.mark.long
@given(st.text())
def test_a_nul_in_a_text_is_no_place_of_a_list(text: str) -> None:
    pieces = b"".join(json_pieces({"a": text + "\0", "b": JsonList([b"1", b"2"])}))
    assert orjson.loads(pieces) == {"a": text + "\0", "b": [1, 2]}


class Client:
    """Takes a message when it is told to."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.takes = asyncio.Semaphore(0)

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        await self.takes.acquire()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_a_piece_is_made_when_the_client_has_taken_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PIECE_BYTES", 100)
    client, made = Client(), list[int]()

    def items() -> Iterator[dict[str, Any]]:
        for number in range(50):
            made.append(number)
            yield {"n": "x" * 40}

    task = asyncio.create_task(Reply(client.send).json(200, {"choices": JsonList(items()), "usage": 1}))
    for _ in range(9):
        await asyncio.sleep(0)
    assert len(made) <= 4, "all is made while the client has taken nothing"
    for taken in range(1, 9):
        client.takes.release()
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(made) <= 4 * taken
    for _ in range(60):
        client.takes.release()
    await task
    assert orjson.loads(client.body) == {"choices": [{"n": "x" * 40}] * 50, "usage": 1}
    assert b"content-length" not in dict(client.messages[0]["headers"])
    assert max(len(message.get("body", b"")) for message in client.messages) < 200


async def test_a_short_answer_is_one_message_with_its_length() -> None:
    client = Client()
    for _ in range(9):
        client.takes.release()
    await Reply(client.send).json(200, {"choices": JsonList([{"a": 1}])})
    assert [message["type"] for message in client.messages] == ["http.response.start", "http.response.body"]
    assert dict(client.messages[0]["headers"])[b"content-length"] == b"21"


@pytest.mark.parametrize(("num_bytes", "held"), [(PIECE_BYTES, 0), (PIECE_BYTES + 1, PIECE_BYTES + 1)])
async def test_the_body_is_counted_until_the_head_of_the_answer(num_bytes: int, held: int) -> None:
    """A long one until its end, because it is kept."""
    client = Client()
    reply = Reply(client.send)
    bytes_held = HeldBytes(8 * PIECE_BYTES)
    reply.body_share = Share(bytes_held)
    reply.body_share.grow(num_bytes)
    client.takes.release()
    await reply.start(200, [])
    assert bytes_held.num_come == held
