"""Offsets are positions in the text by character: `text[offset:]` begins with the token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.text.detokenizer import Detokenizer
from pd_cluster.server.text.text_offsets import TextOffsets, echo_offsets
from tests.server.fake_engine import FakeEngine, Line
from tests.server.live_server import Node, demo_tokenizer, running
from tests.server.sse import post_events
from tests.server.test_detokenizer import Bytes

DEMO = demo_tokenizer()
URL = "/v1/completions"
EMOJI = "Hi 😀 é end"


def check(text: str, token_ids: list[int], offsets: list[int], *, skip_special: bool = True) -> None:
    """Each token's own characters stand at its offset, and the next token's offset is after them."""
    assert offsets == sorted(offsets)
    assert len(offsets) == len(token_ids)
    for token_id, offset in zip(token_ids, offsets, strict=True):
        if skip_special and DEMO.is_special(token_id):
            continue
        try:
            piece = DEMO.token_bytes(token_id).decode()
        except UnicodeDecodeError:  # a part of a character
            continue
        assert text[offset:].startswith(piece), (token_id, offset)


@pytest.mark.long
@given(st.lists(st.integers(0, 3071), max_size=40), st.booleans())
def test_any_tokens_begin_where_their_offset_says(ids: list[int], skip_special: bool) -> None:
    detokenizer = Detokenizer(DEMO, skip_special=skip_special)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    found = TextOffsets(DEMO, skip_special=skip_special)
    offsets = [*found.of(ids[:5]), *found.of(ids[5:])]
    check(text, ids, offsets, skip_special=skip_special)
    assert found.of([71])[0] == len(text)


def test_parts_of_a_character_share_its_offset() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x98", b"\x80b", b"<s>", b"\xc3", b"c", b""]
    vocabulary = Bytes(pieces, frozenset({4}))
    assert TextOffsets(vocabulary).of(range(8)) == [0, 1, 1, 1, 3, 3, 4, 5]
    assert TextOffsets(vocabulary, 7, skip_special=False).of([0, 4, 0]) == [7, 8, 11]


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("Hello x", [b"<s>", b" Hello", b" x"], [0, 0, 5]),  # a special token and a blank that the tokenizer adds
        ("<s>a", [b"<s>", b"a"], [0, 3]),  # the client's own
        ("e\u0301x y", ["é".encode(), b"x", b" y"], [0, 2, 3]),  # a normal form
        ("a😀b", [b"a", b"\xf0\x9f", b"\x98\x80", b"b"], [0, 1, 1, 2]),
        ("ab", [b"zzzzzzzzzzzzzzz", b"a", b"b"], [0, 0, 1]),
    ],
)
def test_a_client_s_own_text_has_the_offsets(text: str, pieces: list[bytes], expected: list[int]) -> None:
    special = frozenset({at for at, raw in enumerate(pieces) if raw == b"<s>"})
    assert echo_offsets(Bytes(pieces, special), range(len(pieces)), text) == expected


async def answers(node: Node, body: dict[str, Any]) -> list[tuple[str, dict[str, list[Any]]]]:
    """Text and logprobs, whole and streamed."""
    async with node.session.post(f"{node.url}{URL}", json=body) as response:
        assert response.status == 200, await response.text()
        [choice] = (await response.json())["choices"]
    events = await post_events(node.session, f"{node.url}{URL}", body | {"stream": True})
    parts = [one for _, data in events if data != "[DONE]" for one in data["choices"]]
    told = [one["logprobs"] for one in parts if one["logprobs"]]
    streamed = {name: [value for one in told for value in one[name]] for name in told[0]}
    return [(choice["text"], choice["logprobs"]), ("".join(one["text"] for one in parts), streamed)]


@pytest.mark.anyio
async def test_offsets_of_an_answer_with_hidden_tokens() -> None:
    """Special tokens in the middle and at the end, and a stop token, which is hidden though it is no special one."""
    ids = await DEMO.encode(EMOJI, max_tokens=99)
    special = next(token_id for token_id in range(9) if DEMO.is_special(token_id))
    output = [special, *ids[:4], special, *ids[4:], special]

    async def stops(line: Line) -> None:
        *before, last = (line.request.sampling.stop_token_ids and output[:-1]) or output
        for token_id in before:
            line.tokens([token_id])
        stop = last if line.request.sampling.stop_token_ids else None
        line.tokens([last], finish=FinishReason.STOP, stop_token_id=stop)

    async with running(FakeEngine(stops)) as node:
        body = {"prompt": "hi", "max_tokens": 20, "logprobs": 0}
        for text, logprobs in await answers(node, body):
            assert text == EMOJI
            check(text, output, logprobs["text_offset"])
            assert logprobs["text_offset"][-1] == len(text)
        for text, logprobs in await answers(node, body | {"skip_special_tokens": False}):
            check(text, output, logprobs["text_offset"], skip_special=False)
        shorter = DEMO.text_of(ids[:-1])
        for text, logprobs in await answers(node, body | {"stop_token_ids": [ids[-1]]}):
            assert text == shorter
            check(text, output[:-2], logprobs["text_offset"][:-1])
            assert logprobs["text_offset"][-1] == len(text)
        shown = {"stop_token_ids": [ids[-1]], "include_stop_str_in_output": True}
        for text, logprobs in await answers(node, body | shown):
            assert text == EMOJI
            check(text, output[:-1], logprobs["text_offset"])
