"""What an endpoint picker chooses, what it tells the node, and what a request occupies: without gRPC."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pd_connectors.protocol.feed import NodeLoad
from pd_connectors.protocol.ticket import OFFER_HEADER, Offer, verify
from pd_http.errors import InvalidRequest, ModelNotFound, StartupError
from pd_http.held_bytes import HeldBytes
from pd_router.calls.body import RequestBody
from pd_router.endpoint_picker.config import PickerConfig
from pd_router.endpoint_picker.picks import EndpointPicker, Pick, address_of, subset_of
from pd_router.errors import NoNode
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.trial import MOST
from pd_router.nodes.upstream import Upstream
from pd_router.policy.cost_policy import CostPolicy
from pd_router.records.metrics import RouterMetrics
from pd_router.records.recent_requests import RecentRequests
from pd_router.records.request_sinks import RequestSinks
from pd_router.requests.background import Background
from pd_router.requests.services import Services

KEY = b"k" * 32
PATH = "/v1/completions"
NOW_S = 100.0


def services(num_prefill: int = 2, num_decode: int = 2, **settings: Any) -> Services:
    """All nodes healthy, at addresses 10.0.1.N (prefill) and 10.0.2.N (decode)."""
    config = PickerConfig(
        prefill=tuple(f"http://10.0.1.{n}:8100" for n in range(num_prefill)),
        decode=tuple(f"http://10.0.2.{n}:8100" for n in range(num_decode)),
        **settings,
    )
    table = NodeTable(config, lambda: NOW_S)
    for node in table.nodes:
        node.reachable = True
        node.models = frozenset({"demo"})
    metrics = RouterMetrics(table)
    sinks, recent = RequestSinks(config, metrics), RecentRequests(lambda: NOW_S)
    upstream, background, held = Upstream(config), Background(), HeldBytes(1)
    return Services(
        config, table, CostPolicy(config), upstream, metrics, background, sinks, recent, KEY, lambda: NOW_S, held
    )


def body(*, stream: bool = True, **fields: Any) -> RequestBody:
    return RequestBody(json.dumps({"model": "demo", "prompt": "x" * 4000, "stream": stream, **fields}).encode())


def pick(made: Services, subset: frozenset[str] | None = None, **fields: Any) -> Pick:
    return EndpointPicker(made, fallbacks=2).pick(PATH, body(**fields), {}, subset)


def load(node: Node) -> tuple[int, int]:
    return node.prefill_bytes, node.decode_sequences


def prefills(made: Services) -> list[Node]:
    return [node for node in made.table.nodes if node.role is Role.PREFILL]


def decodes(made: Services) -> list[Node]:
    return [node for node in made.table.nodes if node.role is not Role.PREFILL]


def test_a_handoff_names_decode_nodes_and_carries_the_signed_offer() -> None:
    made = services(num_decode=4)
    picked = pick(made)
    assert picked.route.text == "d-first; reason=default"
    assert len(picked.destination.split(",")) == 3
    assert {address_of(node) for node in picked.nodes} <= {f"10.0.2.{n}:8100" for n in range(4)}
    offer = verify(KEY, picked.headers[OFFER_HEADER], Offer, NOW_S)
    assert sorted(offer.prefill_urls) == ["http://10.0.1.0:8100", "http://10.0.1.1:8100"]
    assert offer.expires_at_s == NOW_S + made.config.offer_ttl_s


def test_the_gateway_names_the_client_by_its_address() -> None:
    """The last one is the gateway's word; those before it are the client's."""
    picker = EndpointPicker(services(), fallbacks=0)
    told = {"1.2.3.4": "1.2.3.4", "9.9.9.9, 2001:db8::1": "2001:db8::/64", "x" * 60_000: "", "\u4f60": ""}
    for given, name in ((None, ""), *told.items()):
        headers = {} if given is None else {"x-forwarded-for": given}
        assert picker.pick(PATH, body(), headers, None).headers.get("x-pd-client") == (f"net:{name}" if name else None)


def test_equal_nodes_take_turns_and_charges_spread_a_burst() -> None:
    made = services()
    picker = EndpointPicker(made, fallbacks=0)
    picks = [picker.pick(PATH, body(), {}, None) for _ in range(8)]
    assert [load(node)[1] for node in decodes(made)] == [4, 4]
    for one in picks:
        one.close()
    assert [load(node) for node in made.table.nodes] == [(0, 0)] * 4


def test_charges_follow_the_answer() -> None:
    made = services(num_prefill=1, num_decode=1)
    [prefill], [decode] = prefills(made), decodes(made)
    picked = pick(made, n=3)
    assert load(prefill)[0] > 4000
    assert load(decode) == (0, 3)
    picked.answered(prefill.node_id, decode.node_id)
    assert load(prefill)[0] == 0
    assert load(decode)[1] == 3
    picked.close()
    picked.close()
    assert load(decode) == (0, 0)


@pytest.mark.parametrize("served_by", ["10.0.2.1:8100", "node-1"])
def test_a_retry_at_another_node_frees_the_first(served_by: str) -> None:
    made = services()
    made.table.nodes[3].node_id = "node-1"
    picked = pick(made)
    other = next(node for node in decodes(made) if node is not picked.nodes[0])
    named = served_by if other is made.table.nodes[3] else "10.0.2.0:8100"
    picked.answered("", named)
    assert load(picked.nodes[0]) == (0, 0)


def test_unstreamed_prefills_end_by_their_estimate() -> None:
    async def run() -> None:
        made = services(num_prefill=1, num_decode=1)
        made.table.nodes[0].speed.note(10_000_000, 0.0, NOW_S)
        picked = pick(made, stream=False)
        assert load(made.table.nodes[0])[0] > 0
        picked.close()
        assert load(made.table.nodes[0])[0] == 0

    asyncio.run(run())


def test_an_idle_prefill_node_with_a_long_pace_is_offered_now_and_then() -> None:
    """Not by each pick: one that was tried is not offered again before others have paid for it."""
    made = services(num_prefill=1, num_decode=1)
    for node, token_s in zip(made.table.nodes, (60e-6, 20e-6), strict=True):
        node.view.receive(NodeLoad(num_slots=64, free_blocks=5000, block_size=64, token_s=token_s), ())
    texts = []
    for _ in range(2 * MOST):
        found = pick(made)
        texts.append((found.route.text, found.prefill_node))
        found.close()
    assert set(texts) == {("direct; reason=prefill-busy", None), ("d-first; reason=prefill-idle", prefills(made)[0])}
    assert 1 <= sum(node is not None for _, node in texts) <= 10


def test_without_prefill_nodes_the_decode_node_reads_the_prompt() -> None:
    made = services(num_prefill=0)
    picked = pick(made)
    assert picked.route.text == "direct; reason=no-prefill-node"
    assert OFFER_HEADER not in picked.headers
    assert load(picked.nodes[0])[0] > 4000


def test_nodes_of_other_weights_get_no_offer() -> None:
    made = services(num_prefill=1, num_decode=2)
    for node, version in zip(made.table.nodes, ("a", "b", "a"), strict=True):
        node.kv_version = version
    assert [node.kv_version for node in pick(made).nodes] == ["a"]
    alone = pick(made, frozenset({"10.0.2.0:8100"}))
    assert (alone.route.text, alone.destination) == ("direct; reason=no-pair", "10.0.2.0:8100")
    assert OFFER_HEADER not in alone.headers


def test_the_gateway_may_name_the_nodes_to_choose_among() -> None:
    made = services()
    for _ in range(3):
        assert pick(made, frozenset({"10.0.2.1:8100"})).destination == "10.0.2.1:8100"
    for subset in (frozenset[str](), frozenset({"10.0.1.0:8100"})):  # none; a prefill node
        with pytest.raises(NoNode):
            pick(made, subset)
    assert [load(node) for node in prefills(made)] != [(0, 0), (0, 0)]
    assert subset_of(["10.0.0.1:1, 10.0.0.2:2", "10.0.0.3:3"]) == {"10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"}


def test_a_call_without_a_prompt_goes_to_any_decode_node_and_charges_none() -> None:
    made = services()
    picked = EndpointPicker(made, fallbacks=1).any_node(None)
    assert picked.route.text == "direct; reason=no-prompt"
    assert len(picked.nodes) == 2
    assert [load(node) for node in made.table.nodes] == [(0, 0)] * 4


def test_refusals_charge_nothing() -> None:
    made = services()
    picker = EndpointPicker(made, fallbacks=2)
    with pytest.raises(InvalidRequest, match="p-first is an order of the router"):
        picker.pick(PATH, body(), {"x-pd-route": "p-first"}, None)
    with pytest.raises(ModelNotFound):
        picker.pick(PATH, body(model="other"), {}, None)
    for node in decodes(made):
        node.reachable = False
    with pytest.raises(NoNode):
        picker.pick(PATH, body(), {}, None)
    with pytest.raises(NoNode):
        picker.any_node(None)
    assert [load(node) for node in made.table.nodes] == [(0, 0)] * 4


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8100", "10.0.0.1:8100"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00::1]:8100", "[fd00::1]:8100"),
        ("http://node-1:8100", None),
    ],
)
def test_destinations_are_ip_addresses(url: str, address: str | None) -> None:
    assert address_of(Node(url, Role.DECODE, "d")) == address


@pytest.mark.parametrize(
    ("settings", "flag"), [({"workers": 2}, "--workers"), ({"grpc_tls_cert": "a.pem"}, "--grpc-tls-key")]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(StartupError, match=flag):
        PickerConfig(start_empty=True, **settings)
