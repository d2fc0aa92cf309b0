"""The router's pure parts: bodies, events, headers, policy, charges."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_http.errors import InvalidRequest
from pd_http.sse import Event, SseParser
from pd_router.calls import headers
from pd_router.calls.body import RequestBody
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_report import describe
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.charge import Charge

NAMES = st.sampled_from(["ticket", "done", "error", "message"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# --- events


@pytest.mark.long
@given(
    events=st.lists(st.tuples(NAMES, st.binary(min_size=1).map(lambda raw: raw.hex().encode()))),
    cuts=st.lists(st.integers(1, 40)),
    newline=st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_come_out_whole_however_the_bytes_are_cut(
    events: list[tuple[str, bytes]], cuts: list[int], newline: bytes
) -> None:
    stream = b": hello" + newline * 2
    for name, data in events:
        stream += b"event: " + name.encode() + newline + b"data: " + data + newline * 2
    parser = SseParser()
    found: list[Event] = []
    for size in [*cuts, len(stream)]:
        found += parser.feed(stream[:size])
        stream = stream[size:]
    assert found == [Event(name, data) for name, data in events]


def test_events_of_several_lines_and_without_names() -> None:
    assert SseParser().feed(b"data: 1\ndata:2\n\nid: 3\n\n") == [Event("message", b"1\n2")]
    assert SseParser().feed(b"event: a\n\ndata: 1\n\n") == [Event("message", b"1")]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_http.sse.MAX_EVENT_BYTES", 10)
    with pytest.raises(ValueError, match="longer than 10"):
        SseParser().feed(b"data: 0123456789")


# --- bodies


@pytest.mark.long
@given(fields=st.dictionaries(st.text(), JSON), params=st.dictionaries(st.text(), JSON, max_size=3))
def test_bodies_keep_every_field_that_is_not_ours(fields: dict[str, Any], params: dict[str, Any]) -> None:
    body = RequestBody(orjson.dumps(fields | {"kv_transfer_params": {"forged": 1}}))
    kept = {name: value for name, value in fields.items() if name != "kv_transfer_params"}
    assert orjson.loads(body.plain()) == kept
    assert orjson.loads(body.with_transfer(params)) == kept | {"kv_transfer_params": params}
    leg = orjson.loads(body.for_prefill())
    ours = {"stream", "max_tokens", "max_completion_tokens", "stream_options", "kv_transfer_params"}
    assert {k: v for k, v in leg.items() if k not in ours} == {k: v for k, v in kept.items() if k not in ours}
    assert (leg["stream"], leg["max_tokens"], leg["kv_transfer_params"]["do_remote_decode"]) == (False, 1, True)


@pytest.mark.parametrize(
    ("raw", "model", "stream", "samples"),
    [
        (b"{}", None, False, 1),
        (b'{"model":"m","stream":true,"n":3}', "m", True, 3),
        (b'{"model":1,"stream":"yes","n":"3"}', None, False, 1),
        (b'{"model":null,"stream":null,"n":null}', None, False, 1),
        (b'{"n":-4}', None, False, 1),
    ],
)
def test_what_the_router_reads_from_a_body(raw: bytes, model: str | None, stream: bool, samples: int) -> None:
    body = RequestBody(raw)
    assert (body.model, body.wants_stream, body.num_samples) == (model, stream, samples)


# --- headers


@pytest.mark.parametrize("given_id", ["a", "A-1_b.c:d", "x" * 128])
def test_a_fit_request_id_is_kept(given_id: str) -> None:
    assert headers.request_id({"x-request-id": given_id}) == given_id


@pytest.mark.parametrize("given_id", ["", "a b", "x" * 129, "ä", "a\r\nb", 'a"b'])
def test_an_unfit_request_id_is_replaced(given_id: str) -> None:
    made = headers.request_id({"x-request-id": given_id})
    assert made.startswith("req-")
    assert made != headers.request_id({})


def test_only_two_orders_can_be_asked_for() -> None:
    assert headers.asked_order({}) is None
    assert headers.asked_order({"x-pd-route": "d-first"}) is HandoffOrder.D_FIRST
    for asked in ("direct", "P-first", ""):
        with pytest.raises(InvalidRequest, match="x-pd-route"):
            headers.asked_order({"x-pd-route": asked})


# --- the table


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def table(num_prefill: int = 2, num_decode: int = 2, num_mixed: int = 0) -> NodeTable:
    """All healthy."""
    config = RouterConfig(
        prefill=tuple(f"http://p{i}:1" for i in range(num_prefill)),
        decode=tuple(f"http://d{i}:1" for i in range(num_decode)),
        mixed=tuple(f"http://m{i}:1" for i in range(num_mixed)),
    )
    made = NodeTable(config, FakeClock())
    for node in made.nodes:
        node.reachable = True
        node.models = frozenset({"demo"})
    return made


def test_it_is_told_since_when_a_node_is_down() -> None:
    nodes = table(num_prefill=1)
    clock, node = nodes.clock, nodes.nodes[0]
    assert isinstance(clock, FakeClock)
    assert describe(nodes, node)["down_s"] is None
    nodes.failed(node, unreachable=True)
    clock.now_s += 1.5
    nodes.set_down(node)  # /health says the same: it has been down all the time
    clock.now_s += 1.5
    assert (describe(nodes, node)["down_s"], describe(nodes, node)["healthy"]) == (3.0, False)
    nodes.set_up(node)
    assert (describe(nodes, node)["down_s"], describe(nodes, node)["healthy"]) == (None, True)


def test_an_ejected_node_returns_when_its_time_is_over() -> None:
    nodes = table(num_prefill=1)
    clock, node = nodes.clock, nodes.nodes[0]
    assert isinstance(clock, FakeClock)
    for _ in range(2):
        nodes.failed(node, unreachable=False)
    nodes.answered(node)  # in a row, that is
    for _ in range(2):
        nodes.failed(node, unreachable=False)
    assert node.is_healthy(clock.now_s)
    nodes.failed(node, unreachable=False)
    assert not node.is_healthy(clock.now_s + 4.9)
    assert node.is_healthy(clock.now_s + 5.0)


@pytest.mark.long
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans())))
def test_charges_come_back_exactly_once(steps: list[tuple[int, int, bool, bool]]) -> None:
    node = Node(url="", role=Role.MIXED, node_id="m")
    for prefill_bytes, sequences, prefilled, twice in steps:
        with Charge(node, FakeClock(), prefill_bytes=prefill_bytes, sequences=sequences) as charge:
            if prefilled:
                charge.prefill_done()
                assert node.prefill_bytes == 0
            assert node.decode_sequences == sequences
            if twice:
                charge.release()
        assert (node.prefill_bytes, node.decode_sequences) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [
        ("[5]", 1),
        (" [\n 1, 22,333 ]", 3),
        ('"1, 2"', 0),
        ('["a", "b"]', 0),
        ("[[1, 2], [3]]", 0),
        ("[]", 0),
        ("null", 0),
    ],
)
def test_token_ids_of_one_prompt_are_counted(prompt: str, num_tokens: int) -> None:
    assert RequestBody(f'{{"prompt": {prompt}}}'.encode()).num_token_ids == num_tokens
