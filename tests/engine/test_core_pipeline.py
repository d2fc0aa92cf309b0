"""The engine core with the real worker on CPU: steps that overlap give the tokens of steps that do not."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from pd_cluster.config import CacheConfig, HandoffConfig, LoraConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.engine.core import EngineCore
from pd_cluster.protocol.messages import (
    Abort,
    AddRequest,
    EngineStats,
    FinishReason,
    FromEngine,
    NeedsPrefill,
    PrefillLocally,
    ReleaseLease,
    RequestFailed,
    TicketOpened,
    ToEngine,
    TokensOut,
    Work,
)
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.base import Connector, ConnectorContext
from pd_connectors.registry import create_connector
from tests.drafters import at_fixed_prices
from tests.shallow_model import ONE_LAYER, shallow_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.drafts import Drafter
    from pd_cluster.worker.disk_cache.disk_cache import DiskCache
    from pd_cluster.worker.executor import Executor
    from pd_connectors.base import PublishSpec
    from pd_connectors.protocol.messages import SampledToken
    from pd_connectors.protocol.ticket import Ticket

DEADLINE_S = 60.0
CONFIG = NodeConfig(
    model=ModelConfig(model=shallow_model(), device="cpu", dtype="float32", num_threads=1),
    cache=CacheConfig(num_blocks=14, block_size=16, swap_gb=0.002),
    scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48),
    handoff=HandoffConfig(connector="loopback"),
)
# No two of PROMPTS have blocks of equal tokens. A block of one layer is half as large, so that as many are swapped
ONE_LAYERED = replace(
    CONFIG, model=replace(CONFIG.model, model=shallow_model(ONE_LAYER)), cache=replace(CONFIG.cache, swap_gb=0.001)
)
PROMPTS = tuple([(7 * i + j * j) % 200 + 5 for j in range(length)] for i, length in enumerate((60, 3, 33, 17, 80, 16)))
SAMPLINGS = (
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=5),
    SamplingParams(max_tokens=20, temperature=1.0, seed=6, n=3, top_k=20),
    SamplingParams(max_tokens=27, temperature=1.2, seed=7, frequency_penalty=0.5, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.0, min_tokens=12),
    SamplingParams(max_tokens=1, temperature=0.0),
)


@dataclass
class FakeMailbox:
    """Messages as objects, and the bell."""

    inbox: deque[ToEngine] = field(default_factory=deque)
    outbox: list[FromEngine] = field(default_factory=list)
    bell: threading.Event = field(default_factory=threading.Event)

    def wake(self) -> None:
        self.bell.set()

    def wait(self, timeout_s: float) -> bool:
        was_rung = self.bell.wait(timeout_s)
        self.bell.clear()
        return was_rung

    def receive(self) -> list[ToEngine]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)

    def flush(self) -> None:
        """It is there already."""


class Bench:
    """One core, driven turn by turn, and what its clients have seen."""

    def __init__(
        self, executor: Executor, connector: Connector, mode: str, prefix_caching: bool = True, max_num_seqs: int = 6,
        drafter: Drafter | None = None, host_cache_gb: float = 0.0,
        open_disk: Callable[[Callable[[], None]], DiskCache] | None = None, lora: LoraConfig = CONFIG.lora,
    ) -> None:  # fmt: skip
        self.mailbox = FakeMailbox()
        disk = None if open_disk is None else open_disk(self.mailbox.wake)
        config = replace(
            CONFIG,
            scheduler=replace(CONFIG.scheduler, async_scheduling=mode, max_num_seqs=max_num_seqs),
            cache=replace(CONFIG.cache, prefix_caching=prefix_caching, host_cache_gb=host_cache_gb),
            lora=lora,
        )
        self.core = at_fixed_prices(EngineCore(config, executor, connector, self.mailbox, drafter=drafter, disk=disk))
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.open: set[str] = set()
        self.stats: EngineStats | None = None
        self.on_ticket: Callable[[TicketOpened], None] = lambda message: None

    def send(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self.open.add(message.request_id)
        self.mailbox.inbox.append(message)

    def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Run until every request has its terminal reply and the engine has all its blocks again."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            busy = self.core.turn()
            if not busy:
                self.core.settle()
            self._collect()
            on_turn()
            if not busy and not self.open and self.stats is not None and not self.stats.kv.in_use:
                return
            assert time.monotonic() < deadline, f"still open: {self.open}, {self.stats}"
            if not busy:
                self.mailbox.wait(0.05)

    def _collect(self) -> None:
        for message in self.mailbox.outbox:
            match message:
                case TokensOut():
                    assert message.request_id in self.open, "a reply after the terminal one"
                    for part in message.sequences:
                        key = message.request_id, part.index
                        assert key not in self.reasons, "tokens after the end"
                        self.tokens.setdefault(key, []).extend(token.token_id for token in part.tokens)
                        if part.finish_reason is not None:
                            self.reasons[key] = part.finish_reason
                    if message.finished:
                        self.open.remove(message.request_id)
                case TicketOpened():
                    self.on_ticket(message)
                case NeedsPrefill():
                    self.send(PrefillLocally(message.request_id))
                case RequestFailed():
                    raise AssertionError(message)
                case EngineStats():
                    self.stats = message
        self.mailbox.outbox.clear()


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor.started(ONE_LAYERED, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def roomy_executor() -> Iterator[DeviceExecutor]:
    roomy = replace(ONE_LAYERED, cache=replace(ONE_LAYERED.cache, num_blocks=64))
    executor = DeviceExecutor.started(roomy, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


@pytest.fixture
def roomy_connector(roomy_executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(roomy_executor)


def make_connector(executor: DeviceExecutor) -> Iterator[Connector]:
    context = ConnectorContext(
        engine_id="bench", epoch=1, fingerprint=executor.model.fingerprint, layout=executor.cache.layout,
        cluster_key=b"k" * 32, host="127.0.0.1", port=0,
    )  # fmt: skip
    ports = executor.connect("loopback", context)
    connector = create_connector("loopback", replace(context, rank_ports=ports))
    connector.register_kv_cache(executor.cache)
    yield connector
    connector.close()


def generate(bench: Bench, on_turn: Callable[[], None] = lambda: None) -> dict[tuple[str, int], list[int]]:
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        bench.send(AddRequest(f"r{index}", list(prompt), sampling))
    bench.run(on_turn)
    return bench.tokens


@contextmanager
def no_garbage() -> Iterator[None]:
    """Whatever becomes of requests, their last references free them: the engine hardly ever searches for the rest."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert gc.collect() <= 4  # which msgspec leaves when it first sees a type; a request is more
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def expected(executor: DeviceExecutor) -> dict[tuple[str, int], list[int]]:
    """One request after the other: nothing is preempted, nothing overlaps. Tests only read it."""
    for connector in make_connector(executor):
        answers = generate(Bench(executor, connector, "off", max_num_seqs=3))
    return answers


def test_depth_follows_the_device() -> None:
    config = SchedulerConfig()
    assert (config.depth_on("cpu"), config.depth_on("cuda:0")) == (1, 2)
    assert replace(config, async_scheduling="on").depth_on("cpu") == 2
    assert replace(config, async_scheduling="off").depth_on("cuda:0") == 1


@pytest.mark.parametrize("mode", ["off", "on"])
def test_tokens_do_not_depend_on_overlap(
    executor: Executor, connector: Connector, expected: dict[tuple[str, int], list[int]], mode: str
) -> None:
    bench = Bench(executor, connector, mode)
    assert generate(bench) == expected
    assert bench.stats is not None
    preempted = sum(bench.stats.counters[f"preemptions_{kind}_total"] for kind in ("recompute", "swap"))
    assert bench.stats.counters["preemptions_swap_total"] > 0, "the cache was meant to be too small"
    assert preempted > 1
    assert {len(tokens) for key, tokens in bench.tokens.items() if key[0] == "r0"} == {24}


def test_overlap_keeps_a_step_under_way(executor: Executor, connector: Connector) -> None:
    bench = Bench(executor, connector, "on")
    bench.send(AddRequest("r", PROMPTS[1], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
    depths = []
    bench.run(lambda: depths.append(len(bench.core._pipeline)))
    assert all(depths[:8])  # after each turn the newest step is still out
    assert max(depths) == 2
    assert depths[-1] == 0


@pytest.mark.parametrize("mode", ["off", "on"])
def test_aborts_of_steps_under_way(
    executor: Executor, connector: Connector, expected: dict[tuple[str, int], list[int]], mode: str
) -> None:
    bench = Bench(executor, connector, mode)
    turns = iter(range(10_000))
    plan = {3: Abort("r4"), 12: Abort("r2", 1), 14: Abort("r0"), 17: Abort("r2", reason=FinishReason.STOP)}

    def abort() -> None:
        message = plan.get(next(turns))
        if message is not None:
            bench.send(message)

    with no_garbage():
        generate(bench, abort)
    for key, tokens in bench.tokens.items():
        whole = bench.reasons[key] is not FinishReason.ABORT and key[0] != "r2"
        assert tokens == (expected[key] if whole else expected[key][: len(tokens)])
    assert bench.reasons["r0", 0] is FinishReason.ABORT
    assert len(bench.tokens["r0", 0]) < 24


@pytest.mark.parametrize("mode", ["off", "on"])
def test_handoffs_between_overlapping_steps(
    roomy_executor: Executor, roomy_connector: Connector, expected: dict[tuple[str, int], list[int]], mode: str
) -> None:
    """The node reads its own leases while it decodes: every request is prefilled under one and taken over."""
    bench = Bench(
        roomy_executor, roomy_connector, mode, prefix_caching=False
    )  # or it would find its own prefill cached

    def take_over(message: TicketOpened) -> None:
        index = int(message.request_id[1:])
        bench.send(AddRequest(f"d{index}", PROMPTS[index], SAMPLINGS[index], Work.TAKE_OVER, message.ticket))

    bench.on_ticket = take_over
    for index in range(5):
        bench.send(AddRequest(f"p{index}", PROMPTS[index], SAMPLINGS[index], Work.PREFILL))
    with no_garbage():
        bench.run()
    assert bench.stats is not None
    assert bench.stats.counters["prefills_remote_total"] == 5
    assert bench.stats.counters["first_token_redraws_total|reason=sampling_mismatch"] == 0
    for (request_id, index), tokens in expected.items():
        if request_id != "r5":
            assert bench.tokens[f"d{request_id[1:]}", index] == tokens
            assert bench.tokens[f"p{request_id[1:]}", index] == tokens[:1]


@pytest.mark.parametrize(
    ("reason", "mode"), [("sampling_mismatch", "off"), ("sampling_mismatch", "on"), ("no_digest", "on")]
)
def test_first_tokens_of_another_sampling_are_drawn_again(
    roomy_executor: Executor,
    roomy_connector: Connector,
    expected: dict[tuple[str, int], list[int]],
    mode: str,
    reason: str,
) -> None:
    """P samples hot, or is too old to say how. What D generates is what it would have generated alone."""
    bench = Bench(roomy_executor, roomy_connector, mode, prefix_caching=False)
    hot = SamplingParams(max_tokens=1, temperature=2.0, seed=77)

    def take_over(message: TicketOpened) -> None:
        index, ticket = int(message.request_id[1:]), message.ticket
        if reason == "no_digest":
            ticket = msgspec.structs.replace(ticket, sampling_digest=b"")
        bench.send(AddRequest(f"d{index}", PROMPTS[index], SAMPLINGS[index], Work.TAKE_OVER, ticket))

    bench.on_ticket = take_over
    for index in range(6):
        sampling = hot if reason == "sampling_mismatch" else SAMPLINGS[index]
        bench.send(AddRequest(f"p{index}", PROMPTS[index], sampling, Work.PREFILL))
    with no_garbage():
        bench.run()
    assert bench.stats is not None
    counters = bench.stats.counters
    assert counters["prefills_remote_total"] == counters[f"first_token_redraws_total|reason={reason}"] == 6
    if mode == "off":  # overlapping steps compute a token after each end
        num_generated = sum(map(len, expected.values()))
        num_shared = 2  # of n = 3 the first tokens come from one
        assert counters["engine_step_tokens_total"] == sum(map(len, PROMPTS)) + num_generated - num_shared
    if reason == "sampling_mismatch":
        assert any(bench.tokens[f"p{index}", 0] != bench.tokens[f"d{index}", 0][:1] for index in range(6))
    for (request_id, index), tokens in expected.items():
        assert bench.tokens[f"d{request_id[1:]}", index] == tokens


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_lease_that_ends_while_its_prompt_is_computed(executor: Executor, connector: Connector, mode: str) -> None:
    bench = Bench(executor, connector, mode)
    bench.on_ticket = lambda message: bench.send(ReleaseLease(message.ticket.lease.lease_id))
    bench.send(AddRequest("p", PROMPTS[4], SAMPLINGS[0], Work.PREFILL))  # two steps long
    with no_garbage():
        bench.run()
    assert bench.reasons == {("p", 0): FinishReason.ABORT}


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_first_token_is_announced_with_the_last_blocks(
    executor: Executor, connector: Connector, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """In one call of the connector, once the step that made both has retired."""
    bench = Bench(executor, connector, mode)
    log: list[tuple[int, tuple[SampledToken, ...]] | None] = []  # None: a step has retired

    def send_after(publishes: Sequence[PublishSpec]) -> None:
        log.extend((publish.num_tokens, publish.first_tokens) for publish in publishes)

    wait = bench.core._pipeline.retire

    def retire() -> tuple[Batch, StepResult]:
        log.append(None)
        return wait()

    monkeypatch.setattr(bench.core._pipeline, "retire", retire)
    monkeypatch.setattr(connector, "send_after", send_after)
    monkeypatch.setattr(connector, "finish_lease", lambda *args: pytest.fail("a second announcement"))
    tickets: list[Ticket] = []
    bench.on_ticket = lambda message: tickets.append(message.ticket)
    bench.send(AddRequest("p", PROMPTS[4], SAMPLINGS[0], Work.PREFILL))  # 80 tokens: two steps of at most 48
    for _ in range(20):
        bench.core.turn()
        bench._collect()
        if ("p", 0) in bench.reasons or bench.tokens:
            break
    bench.send(ReleaseLease(tickets[0].lease.lease_id))
    bench.run()
    token = bench.tokens["p", 0][0]
    announced = [(item[0], [one.token_id for one in item[1]]) for item in log if item is not None]
    assert announced == [
        (0, []), (48, []), (80, [token]),
    ]  # fmt: skip
    assert log.index((48, ())) > log.index(None)
    assert log[log.index((48, ())) + 1] is None, "the second step, before its blocks"


def test_stop_retires_what_is_under_way(
    executor: Executor, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(executor, connector, "on")
    num_sent: list[int] = []
    monkeypatch.setattr(bench.mailbox, "flush", lambda: num_sent.append(len(bench.mailbox.outbox)))
    bench.send(AddRequest("r", PROMPTS[0], SAMPLINGS[0]))
    for _ in range(4):
        bench.core.turn()
    assert len(bench.core._pipeline) > 0
    bench.core.stop()
    bench.core.run()
    assert len(bench.core._pipeline) == 0
    assert num_sent[-1] == len(bench.mailbox.outbox) > 0, "its tokens are not kept until the engine has closed"
    bench.core._stopping = False  # leave the shared executor without rows
    bench.send(Abort("r"))
    bench.open.add("r")
    bench.run()


def test_blocks_are_checked_when_idle_and_at_the_end(
    executor: Executor, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as soon as there is nothing to do: counting takes milliseconds, and the next request may be under way."""
    bench, happened = Bench(executor, connector, "off"), list[str]()
    waits = iter(["rung", "", "", "rung", "rung", "", "rung too late", ""])

    def wait(timeout_s: float) -> bool:
        happened.append("wait")
        end = next(waits, None)
        if end is None:
            bench.core.stop()
        elif end:
            bench.send(AddRequest(str(len(happened)), PROMPTS[1], SAMPLINGS[5]))
        return end == "rung"

    monkeypatch.setattr(bench.mailbox, "wait", wait)
    monkeypatch.setattr(bench.core._blocks, "check", lambda: happened.append("check"))
    bench.core.run()
    assert " ".join(happened) == "wait wait check wait wait wait wait check wait wait check wait check"


def test_ids_outside_the_vocabulary_are_refused(executor: Executor, connector: Connector) -> None:
    bench, vocab_size = Bench(executor, connector, "off"), executor.model.vocab_size
    for wrong in (-1, vocab_size, (1 << 32) + 5, -(1 << 40)):
        bench.mailbox.inbox.append(AddRequest(str(wrong), [5, wrong, 6], SAMPLINGS[5]))
    bench.core.turn()
    failed = [message for message in bench.mailbox.outbox if isinstance(message, RequestFailed)]
    assert [(message.error, message.param) for message in failed] == [("InvalidRequest", "prompt")] * 4
    bench.mailbox.outbox.clear()
    bench.send(AddRequest("right", [0, vocab_size - 1], SAMPLINGS[5]))
    bench.run()
    assert len(bench.tokens["right", 0]) == 1
