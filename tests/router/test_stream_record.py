"""What the router notes of a framed stream is what it gave to the client, however the bytes come."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.stream_codec import encode_message
from pd_http.frames import ChoiceProgress, Frame, StreamFailed
from pd_router.requests import stream_record
from pd_router.requests.framed_answer import FramedAnswer
from pd_router.requests.stream_record import StreamRecord
from tests.router.framed_streams import END, HEAD, make_stream


def noted(record: StreamRecord) -> list[dict[str, object]]:
    """`choices` of the continuation, as a node reads them."""
    choices: list[dict[str, object]] = msgspec.json.decode(msgspec.json.encode(record.continuation()))["choices"]
    return choices


@pytest.mark.long
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.data())
def test_the_record_is_what_the_client_has(seed: int, num_choices: int, data: st.DataObject) -> None:
    """However the bytes are cut into chunks, and wherever they end, also over several nodes."""
    stream = make_stream(seed, num_choices=num_choices)
    record, client, count = StreamRecord(), b"", 0
    for _ in range(data.draw(st.integers(1, 3))):
        written = b"".join(stream.messages(skip=count))
        answer, at = FramedAnswer(record), 0
        ends_at = data.draw(st.integers(len(encode_message(HEAD)), len(written)))
        while at < ends_at:
            size = data.draw(st.integers(1, 200))
            client += answer.feed(written[at : min(at + size, ends_at)])
            at += size
        assert answer.has_begun
        assert answer.error is None
        count = stream.count_of(noted(record))
        assert record.num_tokens == sum(len(p.token_ids) for f in stream.frames[:count] for p in f.choices)
        given = b"".join(frame.data for frame in stream.frames[:count])
        if answer.last is not None:
            assert client == stream.text
            return
        assert client == given, "no byte of an incomplete frame, and all of the others"


def test_the_head_goes_to_the_next_node_as_it_came() -> None:
    record = StreamRecord()
    assert not record.can_continue
    record.begin(HEAD)
    assert record.can_continue
    assert msgspec.to_builtins(record.continuation().head) == {
        "stream_version": "version-1", "response_id": "cmpl-1", "created": 1_700_000_000, "seed": 17,
        "num_prompt_tokens": 3, "num_cached_tokens": 0, "prompt_digest": b"\x00digest\xff".hex(),
    }  # fmt: skip


@pytest.mark.parametrize("field", ["stream_version", "response_id", "created", "seed", "num_prompt_tokens"])
def test_another_stream_does_not_go_on(field: str) -> None:
    record = StreamRecord()
    record.begin(HEAD)
    value = getattr(HEAD, field)
    with pytest.raises(ValueError, match=field):
        record.begin(msgspec.structs.replace(HEAD, **{field: value + ("x" if isinstance(value, str) else 1)}))
    record.begin(msgspec.structs.replace(HEAD, num_cached_tokens=2))  # another node's cache holds other prompts


def test_a_stream_of_no_version_is_passed_on_and_not_continued() -> None:
    record = StreamRecord()
    record.begin(msgspec.structs.replace(HEAD, stream_version=""))
    assert not record.can_continue


def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_record, "MAX_RECORD_TOKENS", 10)
    record = StreamRecord()
    answer = FramedAnswer(record)
    answer.feed(encode_message(HEAD))
    frame = encode_message(Frame((ChoiceProgress(0, (1, 2, 3), 1),), b"x"))
    assert answer.feed(frame * 3) == b"xxx"
    assert record.can_continue
    assert record.num_tokens == 9
    assert answer.feed(frame * 2) == b"xx", "the client gets what it asked for"
    assert not record.can_continue
    assert record.num_tokens == 0
    assert record.num_told == 15, "tokens are still counted"


def test_choices_that_go_on_side_by_side_count_once() -> None:
    record = StreamRecord()
    record.begin(HEAD)
    told = []
    for counts in ((1, 1), (3, 1), (0, 2), (), (0, 0)):
        record.take(Frame(tuple(ChoiceProgress(index, (7,) * num, 1) for index, num in enumerate(counts)), b"x"))
        told.append(record.num_told)
    assert told == [1, 4, 6, 6, 6]


GOOD = Frame((ChoiceProgress(0, (1,), 1),), b"good")
FINISHED = ChoiceProgress(0, (2,), 0, "stop")


@pytest.mark.parametrize(
    "bad",
    [
        Frame((ChoiceProgress(1, (5,), 1), ChoiceProgress(0, (-1,), 1)), b"bad"),
        Frame((ChoiceProgress(1, (5,), 1), ChoiceProgress(0, (1 << 32,), 1)), b"bad"),
        Frame((ChoiceProgress(1, (5,), 1), ChoiceProgress(0, (1,), -1)), b"bad"),
        Frame((ChoiceProgress(1, (5,), 1), ChoiceProgress(-1, (1,), 1)), b"bad"),
        Frame((ChoiceProgress(1, (5,), 1), ChoiceProgress(1 << 40, (1,), 1)), b"bad"),
        Frame((FINISHED, ChoiceProgress(0, (3,), 1)), b"bad"),
        HEAD,
    ],
)
def test_a_frame_is_taken_whole_or_not_at_all(bad: Frame) -> None:
    record = StreamRecord()
    answer = FramedAnswer(record)
    data = b"".join(encode_message(message) for message in (HEAD, GOOD, bad, GOOD))
    assert answer.feed(data) == b"good", "what came before it in the same chunk"
    assert answer.error is not None
    assert answer.feed(encode_message(GOOD)) == b""
    assert noted(record) == [
        {"index": 0, "token_ids": [1], "num_chars": 1, "finish_reason": "", "num_cached_tokens": 0}
    ]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x01", b"data: {}\n\n", encode_message(GOOD)])
def test_bytes_that_are_no_frames_reach_no_client(data: bytes) -> None:
    answer = FramedAnswer(StreamRecord())
    answer.feed(data)
    assert answer.feed(b"data: {}\n\n" * 4) == b""
    assert answer.error is not None or not answer.has_begun


@pytest.mark.parametrize("first", [GOOD, END])
def test_the_node_that_goes_on_has_a_head_too(first: Frame) -> None:
    """Bytes before it would not reach the client: the answer has not begun."""
    record = StreamRecord()
    record.begin(HEAD)
    answer = FramedAnswer(record)
    assert answer.feed(encode_message(first) + encode_message(HEAD)) == b""
    assert answer.error is not None
    assert record.num_tokens == 0


def test_a_choice_that_ended_without_tokens_is_told() -> None:
    """As those of `max_tokens` 0: another node would write their echo again."""
    record = StreamRecord()
    record.begin(HEAD)
    record.take(Frame((ChoiceProgress(0, (), 0, "length"), ChoiceProgress(1, (), 0)), b"data: an echo\n\n"))
    assert [(one["index"], one["finish_reason"]) for one in noted(record)] == [(0, "length")]


def test_a_choice_that_finished_does_not_go_on() -> None:
    record = StreamRecord()
    answer = FramedAnswer(record)
    finished, more = Frame((FINISHED,), b"a"), Frame((ChoiceProgress(0, (), 1),), b"b")
    assert answer.feed(encode_message(HEAD) + encode_message(finished) + encode_message(more)) == b"a"
    assert answer.error is not None


@pytest.mark.parametrize("end", [END, StreamFailed(503, "engine_died", b"the error event")])
def test_nothing_comes_after_the_end(end: object) -> None:
    answer = FramedAnswer(StreamRecord())
    data = b"".join(encode_message(message) for message in (HEAD, GOOD, end))  # type: ignore[arg-type]
    assert answer.feed(data) == b"good" + (END.data if end is END else b"")
    assert answer.last == end
    assert answer.feed(encode_message(GOOD)) == b""
    assert answer.error is not None


def test_a_frame_before_the_head_of_a_continued_answer_is_not_noted() -> None:
    """The head is awaited before the client gets the first bytes: a frame before it would be noted and lost."""
    record = StreamRecord()
    FramedAnswer(record).feed(encode_message(HEAD) + encode_message(Frame((ChoiceProgress(0, (1,), 1),), b"x")))
    answer = FramedAnswer(record)
    assert answer.feed(encode_message(Frame((ChoiceProgress(0, (2,), 1),), b"y"))) == b""
    assert answer.error is not None
    assert record.num_tokens == 1
