"""A worker at its end of the channel: what it knows before it serves, and what becomes of it without a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families as read

from pd_router.app import create_app
from pd_router.config import RouterConfig
from pd_router.edge.worker_views import WorkerViews, labelled
from pd_router.errors import Stopping, WorkerLate
from pd_router.process import worker_messages as messages
from pd_router.process.worker_channel import WorkerChannel
from pd_router.sources.node_change import NodeChange, RestartState
from pd_router.watch.health import HealthPoller
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.router_process import KEY, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.applications import Starlette

    from pd_router.nodes.node_table import NodeTable

pytestmark = pytest.mark.anyio


class Supervisor:
    """The other end."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.worker = WorkerChannel(0, theirs)
        self.app: Starlette = create_app(RouterConfig(start_empty=True), KEY, worker=self.worker)
        self.has_lost = False
        self.worker.on_lost = lambda: setattr(self, "has_lost", True)

    async def tell(self, *told: messages.ToWorker) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, b"".join(messages.line_of(one) for one in told))

    async def received(self) -> list[messages.ToSupervisor]:
        data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
        return [msgspec.json.decode(line, type=messages.ToSupervisor) for line in data.splitlines()]


@contextlib.asynccontextmanager
async def serving(supervisor: Supervisor) -> AsyncIterator[NodeTable]:
    async with asyncio.timeout(WAIT_S), supervisor.app.router.lifespan_context(supervisor.app):
        yield supervisor.app.state.services.table


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor()
    made.socket.setblocking(False)
    yield made
    made.socket.close()


async def test_a_worker_has_polled_the_posted_nodes_before_it_serves(supervisor: Supervisor) -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d):
        await supervisor.tell(messages.State(1, RestartState(((d.url, "decode"),))), messages.Go())
        async with serving(supervisor) as table:
            assert [node.is_healthy(table.clock()) for node in table.nodes] == [True]


async def test_a_drain_holds_for_the_boot_that_another_worker_saw_first(supervisor: Supervisor) -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d):
        posted = ((d.url, "decode"),)
        await supervisor.tell(messages.State(1, RestartState(posted, {d.url: 6})), messages.Go())
        async with serving(supervisor) as table:
            services = supervisor.app.state.services
            (node,) = table.nodes
            assert (node.epoch, node.draining) == (7, False), "it has restarted since"
            adopt, poller = supervisor.worker.adopt, HealthPoller(services.config, table, services.upstream)
            adopt(RestartState(posted, {d.url: 8}))
            assert node.draining, "this worker has not polled the new boot"
            d.epoch = 8
            await poller.poll(node)
            assert node.draining
            adopt(RestartState(posted, {d.url: 8}))  # with another change
            assert node.draining
            d.epoch = 9
            await poller.poll(node)
            adopt(RestartState(posted, {d.url: 8}))
            assert not node.draining
            adopt(RestartState(posted, {d.url: 7}))  # an order that comes later than the boot that ends it
            await poller.poll(node)
            assert not node.draining


async def test_a_worker_ends_when_its_supervisor_ends_before_it_serves(supervisor: Supervisor) -> None:
    supervisor.socket.close()
    async with serving(supervisor):
        await until(lambda: supervisor.has_lost)


async def test_orders_and_questions_fail_at_once_without_a_supervisor(supervisor: Supervisor) -> None:
    await supervisor.tell(messages.State(1, RestartState()), messages.Go())
    async with serving(supervisor):
        waiting = asyncio.ensure_future(supervisor.worker.ask("nodes"))
        await asyncio.sleep(0)
        supervisor.socket.close()
        with pytest.raises(Stopping, match="supervisor"):
            await waiting
        with pytest.raises(Stopping, match="supervisor"):
            await supervisor.worker.commit(NodeChange("resume", "http://n:1"))


async def test_the_requests_of_other_workers_are_summed_node_by_node() -> None:
    """A node that was removed finishes its requests beside its own re-addition; a role is heard worker by worker."""

    def told(role: str, state: str, sequences: int) -> dict[str, Any]:
        return {"url": "u", "role": role, "state": state, "outstanding": {"sequences": sequences}}

    views = WorkerViews.__new__(WorkerViews)
    report = [told("decode", "draining", 1), told("decode", "leaving", 2)]
    summed = views._sums(report, {1: [told("prefill", "active", 3), told("decode", "leaving", 40)]})
    assert [entry["outstanding"]["sequences"] for entry in summed] == [4, 42]


async def test_expositions_become_one_with_the_worker_of_each_sample() -> None:
    texts = {}
    for worker in (0, 1):
        registry = CollectorRegistry()
        odd = Gauge("odd", 'A "help"\nof {two} lines.', ["name", "url"], registry=registry)
        for value in (f'a "b"\n{worker} c', "x{y} 1.0", "# HELP odd"):
            odd.labels(value, "http://n:1").set(worker + 0.5)
        Counter("asked", "Plain.", registry=registry).inc(worker)
        Histogram("took_seconds", "Seconds.", buckets=(0.1, 1.0), registry=registry).observe(worker)
        if worker:
            Gauge("only", "Of one worker.", registry=registry).set(3)
        texts[worker] = generate_latest(registry).decode()

    def samples(text: str, **more: str) -> list[tuple[str, list[tuple[str, str]], float]]:
        found = [one for family in read(text) for one in family.samples]
        return sorted((one.name, sorted((one.labels | more).items()), one.value) for one in found)

    merged = labelled(texts).decode()
    assert samples(merged) == sorted(samples(texts[0], worker="0") + samples(texts[1], worker="1"))
    names = [family.name for family in read(merged)]
    assert len(names) == len(set(names)), "a family is not begun twice"
    assert {family.name: family.type for family in read(merged)}["took_seconds"] == "histogram"


async def test_an_order_never_answers_without_the_requests_of_a_late_worker(supervisor: Supervisor) -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d):
        await supervisor.tell(messages.State(1, RestartState(((d.url, "decode"),))), messages.Go())
        async with serving(supervisor) as table:
            views = WorkerViews(table, supervisor.app.state.services.metrics, supervisor.worker)
            await supervisor.received()
            for ask in (views.nodes, views.metrics, lambda: views.node(table.nodes[0])):
                asked = asyncio.ensure_future(ask())
                [question] = await supervisor.received()
                assert isinstance(question, messages.Ask)
                await supervisor.tell(messages.AllTold(question.id, {1: None}))
                if ask in (views.nodes, views.metrics):
                    assert await asked
                else:
                    with pytest.raises(WorkerLate, match=r"\[1\]"):
                        await asked


async def test_an_answer_to_the_process_before_is_none_to_this_one() -> None:
    own, theirs = socket.socketpair()
    with own, theirs:
        one, other = WorkerChannel(0, own), WorkerChannel(0, theirs)
        assert next(one._ids) != next(other._ids)
