"""What an engine reports to routers, as the API process adds it up: exact at every moment, and little when idle."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.news_mirror import NewsMirror
from pd_cluster.engine.news_report import NEWS_S, NO_SHARE
from pd_cluster.protocol.messages import (
    Abort,
    AddRequest,
    EngineNews,
    ReportNews,
    RequestFailed,
    ToEngine,
    TokensOut,
    Work,
)
from pd_cluster.protocol.orders import ResetCache
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.step_model import StepModel, StepWork
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.protocol.feed import DEVICE, HOST
from tests.engine.test_core_pipeline import CONFIG, FakeMailbox, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.config import NodeConfig
    from pd_connectors.base import Connector
    from pd_connectors.protocol.feed import StoredBlock

SIZE = 16


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor.started(CONFIG, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


class Node:
    """An engine and its API process's mirror; a router that reads each change."""

    def __init__(self, executor: DeviceExecutor, connector: Connector, config: NodeConfig = CONFIG) -> None:
        self.now_s = 0.0
        self.mailbox = FakeMailbox()
        self.core = EngineCore(config, executor, connector, self.mailbox, self.clock)
        self.mirror = NewsMirror()
        self.known: dict[int, StoredBlock] = {}
        self.live: set[str] = set()
        self.num_news = 0

    def clock(self) -> float:
        self.now_s += NEWS_S / 20
        return self.now_s

    def send(self, message: ToEngine) -> None:
        if isinstance(message, ReportNews):
            message = self.mirror.switch(is_on=message.is_wanted)
        self.mailbox.inbox.append(message)
        if isinstance(message, AddRequest):
            self.live.add(message.request_id)
            self.mirror.note_sent(message)

    def turn(self) -> None:
        self.core.turn()
        for message in self.mailbox.outbox:
            if isinstance(message, EngineNews):
                self.num_news += 1
                self.mirror.take(message)
            elif isinstance(message, RequestFailed) or (isinstance(message, TokensOut) and message.finished):
                self.live.discard(message.request_id)
        self.mailbox.outbox.clear()
        evicted, stored, moved = self.mirror.take_news()
        for block in evicted:
            del self.known[block]
        self.known |= {one.block: one for one in stored}
        for block, tier in moved:
            self.known[block] = msgspec.structs.replace(self.known[block], tier=tier)
        assert self.known == self.mirror.stored

    def tell(self) -> None:
        """Turn until a report is due, and report."""
        self.now_s += NEWS_S
        self.turn()

    def rest(self) -> None:
        for _ in range(300):
            self.turn()
            self.now_s += NEWS_S
        assert not self.live


def request(rng: random.Random, name: str) -> AddRequest:
    prompt = [rng.randrange(2) + 5] * rng.randrange(1, 90)
    ends = range(SIZE, len(prompt) + 1, SIZE)
    sampling = SamplingParams(max_tokens=rng.choice([1, 3, 9]), n=rng.choice([1, 1, 2]), ignore_eos=True)
    if rng.random() < 0.1:
        prompt *= 99  # longer than the model's context: refused
    return AddRequest(name, prompt, sampling, steps=tuple((end, prompt[0] * 1000 + end) for end in ends))


def test_the_reported_load_ends_at_nothing_and_names_are_those_of_the_cache(
    executor: DeviceExecutor, connector: Connector
) -> None:
    node, rng = Node(executor, connector), random.Random(4)
    node.send(request(rng, "before"))
    node.rest()
    assert not node.num_news
    node.send(ReportNews(True))
    most = 0
    for i in range(24):
        node.send(request(rng, f"r{i}"))
        if rng.random() < 0.3:
            node.send(Abort(f"r{rng.randrange(i + 1)}"))
        if rng.random() < 0.1:
            node.send(ResetCache())
        for _ in range(rng.randrange(5)):
            node.turn()
            most = max(most, 0 if node.mirror.load is None else node.mirror.load.queued_tokens)
    assert most > 100
    node.rest()
    node.now_s += 60.0  # the share of its prompts has faded
    node.tell()
    load = node.mirror.load
    assert load is not None
    assert (load.queued_tokens, load.queued_keys, load.num_running, load.num_waiting) == (0, 0, 0, 0)
    assert load.free_blocks == load.num_blocks
    cached = node.core._blocks.pools[0].cache._by_hash
    assert node.known
    assert node.known.keys() <= {int.from_bytes(one[:8], "little") for one in cached}
    num_news = node.num_news
    node.rest()
    assert node.num_news == num_news, "an idle engine has no news"


def test_names_have_their_tiers_and_the_load_its_seconds() -> None:
    """The real worker with a tiny cache before a tier in host memory: names move down and up."""
    cache = replace(CONFIG.cache, num_blocks=14, swap_gb=0.004, host_cache_gb=0.004)
    config = replace(CONFIG, cache=cache)
    executor, rng = DeviceExecutor.started(config, lambda text: None), random.Random(3)
    heads = [[rng.randrange(5, 200) for _ in range(4 * SIZE)] for _ in range(4)]
    for connector in make_connector(executor):
        node = Node(executor, connector, config)
        host, pool = node.core._blocks.host, node.core._blocks.pools[0]
        node.core._blocks.copies.wait_s, host.gb_s = 0.0, 1e6  # nothing is computed sooner
        node.send(ReportNews(True))
        for index in range(24):
            head = heads[index % 4] if index < 16 else heads[0]
            prompt = [*head, *([5 + index % 5] * SIZE), 7]
            steps = tuple((end, hash((*prompt[:end],))) for end in range(SIZE, len(prompt), SIZE))
            node.send(AddRequest(f"r{index}", prompt, SamplingParams(max_tokens=2, ignore_eos=True), steps=steps))
            while node.live:
                node.turn()
                node.now_s += NEWS_S
        node.rest()
        tiers = {block: one.tier for block, one in node.known.items()}
        on_device = {int.from_bytes(one[:8], "little") for one in pool.cache._by_hash}
        in_host = {int.from_bytes(one[:8], "little") for one in host.groups[0].cached}
        assert {block for block, tier in tiers.items() if tier == DEVICE} == tiers.keys() & on_device
        assert {block for block, tier in tiers.items() if tier == HOST} == tiers.keys() & in_host - on_device
        assert set(tiers.values()) == {DEVICE, HOST}
        assert host.num_loaded, "names have moved up, too"
        assert node.mirror.load is not None
        size = pool.group.block_bytes / SIZE
        assert node.mirror.load.host_token_s == pytest.approx(size / 1e15)
        asked_s = node.core._news._host_token_s
        assert asked_s(has_streams=True) == pytest.approx(2 * size / 1e15), "it has half of a step"
        node.core._blocks.copies.wait_s = 8.192
        assert asked_s(has_streams=False) == pytest.approx(0.001)
    executor.close()


def test_a_node_with_a_target_tells_how_many_streams_more_it_holds(
    executor: DeviceExecutor, connector: Connector
) -> None:
    """Prompts that another node decodes are no streams."""
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, slo_tpot_ms=1000.0))
    node, sampling = Node(executor, connector, config), SamplingParams(max_tokens=99, ignore_eos=True)
    node.send(ReportNews(True))
    node.core._step_model = node.core._room._model = node.core._news._model = StepModel()
    node.send(AddRequest("a", [5] * 20, sampling))
    node.tell()
    assert node.mirror.load is not None
    assert node.mirror.load.tpot_s == 0.0, "no step of this node is known yet"
    node.core._room._model.fit([(StepWork(num, 20 * num), 0.23 * num) for num in (1, 4)])
    node.send(AddRequest("b", [5] * 20, sampling))
    node.send(AddRequest("c", [5] * 20, sampling, Work.PREFILL))
    node.tell()
    load, held = node.mirror.load, node.core._room.beside(0)
    assert held > 2
    assert (load.tpot_s, load.stream_room) == (1.0, held - 2)
    model = node.core._room._model
    assert load.context_s == model.context_s
    live = [seq for seq in node.core._scheduler._queues.sequences.values() if seq.request.request_id in "ab"]
    assert 2 * 20 <= load.num_context <= sum(len(seq.token_ids) for seq in live), "of the two that decode here"
    assert bool(load.step_tokens) == bool(load.step_keys)
    for name in "abc":
        node.send(Abort(name))
    node.rest()
    assert node.mirror.load.stream_room == held


def test_a_node_tells_the_context_of_a_stream_that_it_has_just_accepted(
    executor: DeviceExecutor, connector: Connector
) -> None:
    """Whatever it served before: an idle node's last steps say nothing of a long stream that comes."""
    node, one = Node(executor, connector), SamplingParams(max_tokens=9, ignore_eos=True)
    node.send(ReportNews(True))
    node.send(AddRequest("short", [5] * 3, one))
    node.rest()
    node.send(AddRequest("long", [5] * 90, SamplingParams(max_tokens=9, ignore_eos=True, n=2)))
    node.send(AddRequest("handed over", [5] * 20, one, Work.PREFILL))
    node.tell()
    assert node.mirror.load is not None
    assert 2 * 90 <= node.mirror.load.num_context <= 2 * 99
    node.send(Abort("long"))
    node.send(Abort("handed over"))
    node.rest()
    assert node.mirror.load.num_context == 0


def test_an_idle_engine_tells_that_its_prompts_are_over(executor: DeviceExecutor, connector: Connector) -> None:
    """Within its heartbeats, and few times: a router that heard for ever of a burst sent no stream any more."""
    node = Node(executor, connector)
    node.send(ReportNews(True))
    room = node.core._room
    for _ in range(100):
        node.now_s += 0.1
        room.note(StepWork(0, 0, 1000), 0.1)
    node.tell()
    assert node.mirror.load is not None
    assert node.mirror.load.prompts_share > 0.8
    num_news = node.num_news
    for _ in range(40):
        node.now_s += 1.0
        node.turn()
        assert node.mirror.load.prompts_share <= 2 * room.share + 1 / NO_SHARE
    assert node.mirror.load.prompts_share < 1 / NO_SHARE
    assert node.num_news <= num_news + NO_SHARE.bit_length()


def test_an_idle_engine_waits_as_long_as_ever(executor: DeviceExecutor, connector: Connector) -> None:
    node = Node(executor, connector)
    node.send(ReportNews(True))
    node.send(request(random.Random(1), "r"))
    node.rest()
    assert node.core._news.until(1.0) == pytest.approx(1.0)
