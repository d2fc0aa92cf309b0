"""What a router tells a balance, and where it shows what the balance has decided."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.balancing.snapshot import EndedRequest, read_snapshot
from pd_connectors.protocol.feed import FeedSnapshot, NodeLoad
from pd_http.node_report import NodeReport
from pd_router.records.call_record import CallRecord
from pd_router.records.recent_load import MOST_ENDED, WINDOW_S, LoadPart, RecentLoad, total_load
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, signed, until
from tests.router.test_feed_follower import FakeFeed
from tests.router.test_role_orders import a_node, change
from tests.router.test_sources_posted import call


class Watch:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def a_call(at_s: float, model: str = "m", report: NodeReport | None = None) -> CallRecord:
    record = CallRecord("/v1/completions", "r", at_s, 0.0)
    record.model, record.report, record.ended_s = model, report, at_s
    return record


def test_the_load_is_that_of_the_last_minute_with_what_still_runs() -> None:
    watch = Watch()
    load = RecentLoad(watch)
    for number in range(100):
        watch.now_s += 1.0
        load.begin(record := a_call(watch.now_s, report=NodeReport("m", 100 + number, 40, 7)))
        if number % 2:
            load.end(record)
    refused = a_call(watch.now_s)
    load.begin(refused)
    refused.outcome = "refused"
    load.end(refused)
    told = load.part()
    assert told.arrived_per_s == {"m": pytest.approx(61 / WINDOW_S)}
    assert len(told.seen["m"]) == 31
    assert told.seen["m"][-1] == (0.0, 199, 40, 7)
    assert total_load([told, told, LoadPart({"o": 1.0}, {})]).arrived_per_s["m"] == 2 * told.arrived_per_s["m"]


def test_at_a_high_rate_fewer_lengths_are_kept_and_the_rate_is_right() -> None:
    watch = Watch()
    load = RecentLoad(watch)
    for _ in range(3 * MOST_ENDED):
        watch.now_s += 0.01
        load.begin(record := a_call(watch.now_s, report=NodeReport("m", 10, 20, 5)))
        load.end(record)
    told = load.part()
    assert len(told.seen["m"]) == MOST_ENDED
    assert told.seen["m"][0][2] == 10, "no more cached tokens than there are"
    assert told.arrived_per_s["m"] == pytest.approx(100.0, rel=0.01)


def test_answers_that_take_longer_than_the_minute_are_seen_when_they_end() -> None:
    watch = Watch()
    load = RecentLoad(watch)
    load.begin(record := a_call(watch.now_s, report=NodeReport("m", 75, 0, 4000)))
    watch.now_s += 3 * WINDOW_S
    record.ended_s = watch.now_s
    load.end(record)
    assert load.part() == LoadPart({}, {"m": [(-3 * WINDOW_S, 75, 0, 4000)]})


pytestmark = pytest.mark.anyio


async def ask(router: Router, kind: str, reason: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    return await call(
        router, "POST", "/balance", signed("balance", "*", kind, sender="balance", reason=reason, **fields)
    )


async def test_a_balance_hears_nodes_and_load_and_its_word_is_shown() -> None:
    d1, d2 = a_node("decode", "d-1"), a_node("decode", "d-2")
    d1.feed = FakeFeed(FeedSnapshot(7, 1, NodeLoad(num_running=2, num_slots=8, token_s=1e-5, num_context=70)))
    async with running(d1, d2), serving(decode=[d1, d2], dashboard="open") as router:
        await until(lambda: router.services.table.nodes[0].view.load is not None)
        router.services.recent.load.begin(record := a_call(0.0, "demo", NodeReport("demo", 9, 4, 3)))
        record.arrived_s = record.ended_s = router.services.table.clock()
        router.services.recent.load.end(record)
        assert (await call(router, "GET", "/nodes", {}))[1]["balance"] is None
        status, told = await ask(router, "hold", "few requests")
        snapshot = read_snapshot([told], 1)
        assert status == 200
        assert [(node.name, node.is_live, node.num_streams, node.token_s) for node in snapshot.nodes] == [
            ("d-1", True, 2, 1e-5), ("d-2", False, 0, 0.0),
        ]  # fmt: skip
        assert snapshot.nodes[0].context == 70
        assert [one[1:] for one in snapshot.seen["demo"]] == [EndedRequest(0.0, 9, 4, 3)[1:]]
        await ask(router, "hold", "few requests")
        await ask(router, "change", "prompts wait")
        assert router.count("pd_router_balance_decisions_total", kind="hold") == 1
        assert router.count("pd_router_balance_decisions_total", kind="change") == 1
        for path in ("/nodes", "/dashboard/state"):
            word = (await call(router, "GET", path, {}))[1]["balance"]
            assert (word["sender"], word["kind"], word["reason"]) == ("balance", "change", "prompts wait")
        await change(router, "d-1", "mixed", sender="balance", reason="prompts wait")
        await change(router, "d-1", "prefill", sender="balance", seen_state=9)
        for result in ("obeyed", "refused"):
            assert router.count("pd_router_role_orders_total", sender="balance", result=result) == 1


async def test_without_the_key_nothing_is_heard() -> None:
    d1 = FakeNode("decode", fakes.decode)
    async with running(d1), serving(decode=[d1]) as router:
        for headers, status in (
            ({}, 401), (signed("balance", "*", key=b"x" * 32), 401), (signed("balance", "*", lives_s=-1), 401),
            (signed("drain", "*"), 400),
        ):  # fmt: skip
            assert (await call(router, "POST", "/balance", headers))[0] == status
        assert (await call(router, "GET", "/nodes", {}))[1]["balance"] is None
