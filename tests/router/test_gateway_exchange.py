"""One HTTP request as ext_proc messages: what the gateway is told, and what is counted. Without sockets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")

from pd_connectors.protocol.feed import NodeLoad
from pd_connectors.protocol.text_chain import MAX_CHAIN_BYTES
from pd_connectors.protocol.ticket import OFFER_HEADER
from pd_http.body_turns import LARGE_BODY_BYTES
from pd_router.endpoint_picker.gateway_exchange import DESTINATION, PART_BYTES, GatewayExchange, UnfinishedBodies
from pd_router.endpoint_picker.messages import ProcessingRequest
from pd_router.endpoint_picker.picks import EndpointPicker
from tests.router.gateway_messages import (
    completion,
    parts,
    request_body,
    request_headers,
    response_body,
    response_headers,
    told,
)
from tests.router.test_picks import load, services

if TYPE_CHECKING:
    from pd_router.requests.services import Services


class Gateway:
    """An exchange, and all its answers."""

    def __init__(self, made: Services | None = None, most_unfinished: int = 1 << 20) -> None:
        self.made = made or services()
        self.unfinished = UnfinishedBodies(most_unfinished)
        self.exchange = GatewayExchange(self.made, EndpointPicker(self.made, 2), self.unfinished)

    def send(self, *messages: Any) -> list[Any]:
        return [answer for message in messages for answer in self.exchange.take(message)]

    def end(self) -> str:
        """Close the stream; the outcome that was counted. Asserts that nothing is left."""
        self.exchange.close()
        assert {load(node) for node in self.made.table.nodes} == {(0, 0)}
        assert (self.unfinished.num_bytes, self.made.metrics.num_in_flight) == (0, 0)
        [outcome] = [
            sample.labels["outcome"]
            for metric in self.made.metrics.requests.collect()
            for sample in metric.samples
            if sample.name == "pd_router_requests_total" and sample.value
        ]
        return outcome


def test_a_stream_from_its_headers_to_its_end() -> None:
    gateway = Gateway()
    data = completion()
    assert gateway.send(request_headers(x_request_id="r-1"), request_body(data[:99], is_last=False)) == []
    head, *echoes = gateway.send(request_body(data[99:]))
    named = told(head)
    assert named[DESTINATION] == head.dynamic_metadata["envoy.lb"][DESTINATION]
    assert sorted(named[DESTINATION].split(",")) == ["10.0.2.0:8100", "10.0.2.1:8100"]
    assert named["x-request-id"] == "r-1"
    assert OFFER_HEADER in named
    assert named["content-length"] == str(len(data))
    assert parts(echoes) == [(data[:99], False), (data[99:], True)]
    [answer] = gateway.send(response_headers(x_pd_prefill="p", x_pd_decode="d"))
    assert told(answer)["x-pd-route"] == "d-first; reason=default"
    echoes = gateway.send(response_body(b"data: a"), response_body(b"", is_last=True))
    assert parts(echoes, "response_body") == [(b"data: a", False), (b"", True)]
    assert gateway.end() == "ok"


def test_the_first_token_is_compared_with_what_was_predicted() -> None:
    gateway = Gateway()
    for told_s in (0.0, 1e-4):
        for node in gateway.made.table.nodes:
            node.view.receive(NodeLoad(num_slots=9, token_s=told_s), ())
        exchange = GatewayExchange(gateway.made, EndpointPicker(gateway.made, 2), gateway.unfinished)
        messages = (request_headers(), request_body(completion()), response_headers(), response_body(b"", is_last=True))
        for message in messages:
            list(exchange.take(message))
        exchange.close()
    read, order = gateway.made.metrics.registry.get_sample_value, {"order": "d-first"}
    assert read("pd_router_time_to_first_token_ratio_count", order) == 1
    assert read("pd_router_unpredicted_requests_total", {**order, "reason": "no-figures"}) == 1, "before any told one"


def test_a_clients_own_steering_reaches_no_node() -> None:
    gateway = Gateway()
    data = completion(prompt="y" * 3 * PART_BYTES, kv_transfer_params={"do_remote_decode": True})
    head, *echoes = gateway.send(
        request_headers(x_pd_ticket="stream", x_pd_offer="mine", x_pd_group="g"), request_body(data)
    )
    removed = set(head.request_headers.response.header_mutation.remove_headers)
    assert removed == {"x-pd-ticket", "x-pd-group"}
    assert told(head)[OFFER_HEADER] != "mine"
    sent = parts(echoes)
    assert [is_last for _, is_last in sent] == [False, False, False, True]
    assert max(len(part) for part, _ in sent) == PART_BYTES
    whole = b"".join(part for part, _ in sent)
    assert told(head)["content-length"] == str(len(whole))
    assert json.loads(whole) == {**json.loads(completion()), "prompt": "y" * 3 * PART_BYTES}
    assert gateway.end() == "cut"


def test_a_body_with_trailers_is_chosen_for_at_its_trailers() -> None:
    gateway = Gateway()
    data = completion()
    assert gateway.send(request_headers(), request_body(data, is_last=False)) == []
    head, echo, trailers = gateway.send(ProcessingRequest(request_trailers={}))
    assert DESTINATION in told(head)
    assert parts([echo]) == [(data, False)]
    assert trailers.WhichOneof("response") == "request_trailers"
    gateway.send(response_headers(), response_body(b"x"))
    [ended] = gateway.send(ProcessingRequest(response_trailers={}))
    assert ended.WhichOneof("response") == "response_trailers"
    assert gateway.end() == "ok"


def test_small_calls_pass_at_once() -> None:
    gateway = Gateway()
    [head] = gateway.send(request_headers("/v1/models/demo?x=1", "GET", is_last=True))
    assert set(told(head)) == {DESTINATION, "x-request-id"}
    gateway.send(response_headers(404, is_last=True))
    assert gateway.end() == "refused"
    gateway = Gateway()
    head, echo = gateway.send(request_headers("/tokenize"), request_body(b"{}"))
    assert parts([echo]) == [(b"{}", True)]
    assert gateway.end() == "cut"


@pytest.mark.parametrize(
    ("messages", "status", "code"),
    [
        ([request_headers("/pd/release")], 404, "not_found"),
        ([request_headers("/metrics", "GET")], 404, "not_found"),
        ([request_headers(), request_body(b"[]")], 400, "invalid_json"),
        ([request_headers(is_last=True)], 400, "invalid_json"),
        ([request_headers(), request_body(completion(model="other"))], 404, "model_not_found"),
        ([request_headers(x_pd_route="p-first"), request_body(completion())], 400, "invalid_value"),
        ([request_headers(), request_body(b"x" * 2_000_000, is_last=False)], 413, "body_too_large"),
        ([request_headers(subset=["10.9.9.9:1"]), request_body(completion())], 503, "no_healthy_node"),
        ([request_headers(body_mode=2)], 500, "internal_error"),
    ],
)
def test_refusals_reach_the_client(messages: list[Any], status: int, code: str) -> None:
    gateway = Gateway(services(max_body_mb=1.0))
    [answer] = gateway.send(*messages)
    refusal = answer.immediate_response
    assert (refusal.status.code, json.loads(refusal.body)["error"]["code"]) == (status, code)
    assert told(answer)["content-type"] == "application/json"
    assert ("retry-after" in told(answer)) == (status == 503)
    assert gateway.exchange.is_refused
    assert gateway.end() == ("refused" if status < 500 else "failed")


@pytest.mark.parametrize(
    ("before", "wrong", "words"),
    [
        ([request_headers(x_request_id="r-1")], request_headers(x_request_id="r-2"), "a second request_headers"),
        ([request_headers(), request_body(completion())], request_headers(), "a second request_headers"),
        ([], request_body(completion()), "request_body before request_headers"),
        ([], ProcessingRequest(request_trailers={}), "request_trailers before request_headers"),
    ],
    ids=["twice", "after the body", "body first", "trailers first"],
)
def test_a_stream_is_for_one_request_from_its_headers_on(before: list[Any], wrong: Any, words: str) -> None:
    gateway = Gateway()
    gateway.send(*before)
    [answer] = gateway.send(wrong)
    refusal = answer.immediate_response
    error = json.loads(refusal.body)["error"]
    assert (refusal.status.code, error["code"], refusal.details) == (500, "ext_proc_order", "ext_proc_order")
    assert words in error["message"]
    assert told(answer).get("x-request-id") != "r-2", "the first request's id, if it has come"
    assert gateway.exchange.is_refused
    assert gateway.end() == "failed"


def test_a_gateway_s_own_answer_may_come_without_a_request() -> None:
    gateway = Gateway()
    [answer] = gateway.send(response_headers(403, is_last=True))
    assert answer.WhichOneof("response") == "response_headers"
    gateway.end()


def test_an_anthropic_client_gets_its_own_error() -> None:
    gateway = Gateway()
    [answer] = gateway.send(request_headers("/v1/messages"), request_body(b"{"))
    assert json.loads(answer.immediate_response.body)["type"] == "error"
    gateway.end()


def test_bodies_that_have_not_arrived_whole_are_bounded_over_all_requests() -> None:
    gateway = Gateway(most_unfinished=1000)
    gateway.unfinished.num_bytes += 900  # of others
    [answer] = gateway.send(request_headers(), request_body(b"x" * 101, is_last=False))
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "too_many_unfinished"
    gateway.unfinished.num_bytes -= 900
    assert gateway.end() == "failed"


def test_a_body_must_go_on_until_it_is_whole() -> None:
    """As over HTTP: 64 KiB more or the rest, each body_timeout_s."""
    made = services()
    now_s, limit_s = made.table.clock(), made.config.body_timeout_s
    gateway = Gateway(made)
    made.table.clock = lambda: now_s
    gateway.send(request_headers())
    data = completion(prompt="x" * 200_000)
    now_s += 20.0
    gateway.send(request_body(data[:60_000], is_last=False))
    assert gateway.exchange.left_s == limit_s - 20.0
    gateway.send(request_body(data[60_000:70_000], is_last=False))
    assert gateway.exchange.left_s == limit_s
    now_s += limit_s + 1.0
    gateway.send(request_body(data[70_000:100_000], is_last=False))
    assert gateway.exchange.left_s == 0.0
    [answer] = gateway.exchange.take(None)
    assert answer.immediate_response.status.code == 408
    assert gateway.end() == "refused"
    whole = Gateway(services())
    whole.send(request_headers(), request_body(data))
    assert whole.exchange.left_s is None
    whole.end()
    gateways_own = Gateway(services())
    gateways_own.send(response_headers(404))
    assert gateways_own.exchange.left_s is None
    gateways_own.end()


def test_the_subset_of_the_gateway_is_kept() -> None:
    gateway = Gateway()
    head, _ = gateway.send(request_headers(subset=["10.0.2.1:8100"]), request_body(completion()))
    assert told(head)[DESTINATION] == "10.0.2.1:8100"
    gateway.end()


@pytest.mark.parametrize(
    ("answer", "mode", "outcome"),
    [
        (None, 4, "cut"),
        (response_headers(200), 4, "cut"),  # the client left, or the node broke off
        (response_headers(200), 0, "ok"),  # the gateway does not show the body
        (response_headers(503), 0, "failed"),
        (response_headers(429, is_last=True), 4, "refused"),
    ],
)
def test_outcomes(answer: Any, mode: int, outcome: str) -> None:
    gateway = Gateway()
    gateway.send(request_headers(answer_mode=mode), request_body(completion()))
    if answer is not None:
        gateway.send(answer)
    assert gateway.end() == outcome


def test_the_node_that_served_is_known_from_the_gateway() -> None:
    gateway = Gateway()
    head, _ = gateway.send(request_headers(), request_body(completion()))
    first, second = told(head)[DESTINATION].split(",")
    gateway.send(response_headers(served=second))
    assert {node.decode_sequences for node in gateway.made.table.nodes} == {0}
    assert first != second
    gateway.end()


def test_a_bug_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(EndpointPicker, "pick", fail)
    [answer] = gateway.send(request_headers(), request_body(completion()))
    assert answer.immediate_response.status.code == 500
    assert gateway.end() == "crashed"


@pytest.mark.parametrize("path", ["/secret", "/v1/models/secret"])
def test_a_record_has_no_path_that_a_client_made_up(path: str) -> None:
    gateway = Gateway()
    gateway.send(request_headers(path, "GET"))
    gateway.exchange.close()
    assert gateway.exchange._record.path == ""


def test_a_large_body_is_read_in_its_turn_and_a_long_prompt_is_counted() -> None:
    gateway = Gateway(most_unfinished=4 << 20)
    data = completion(prompt="a" * (MAX_CHAIN_BYTES + 1))
    first, last = request_body(data[:999], is_last=False), request_body(data[999:])
    head = request_headers()
    assert [gateway.exchange.num_to_read(one) for one in (head, first)] == [0, 0]
    gateway.send(head, first)
    assert gateway.exchange.num_to_read(last) == len(data) >= LARGE_BODY_BYTES
    gateway.send(last)
    assert gateway.exchange.num_to_read(last) == 0  # it was read
    assert gateway.made.metrics.unchained._value.get() == 1
    gateway.end()


def test_a_body_with_too_many_members_gets_a_400() -> None:
    gateway = Gateway()
    [answer] = gateway.send(request_headers(), request_body(b'{"prompt":"a","x":[%s]}' % b",".join([b"{}"] * 100_000)))
    assert answer.immediate_response.status.code == 400
    assert b"65536 are allowed" in answer.immediate_response.body
    assert gateway.end() == "refused"
