"""Several engines over a faulty network in virtual time, with the checks that every schedule must pass.

Each engine is prefill and decode node at once. It is as hostile as an engine may be: it overwrites a block in the very
moment in which it becomes free, and checks that nothing else ever writes one.

Engines may have several ranks, each of its own degree. A rank that dies takes its engine with it, but only after a
while, in which rank 0 goes on without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from pd_connectors.base import (
    CacheDescription,
    ConnectorContext,
    Event,
    FirstTokens,
    LeaseEnded,
    LoadDone,
    LoadDrained,
    LoadFailed,
    LoadReady,
    LoadSpec,
    PublishSpec,
)
from pd_connectors.loopback import LoopbackChannel, LoopbackNetwork, LoopbackNode, LoopbackTransport
from pd_connectors.p2p import PeerToPeerConnector
from pd_connectors.protocol.errors import LeaseEnd, LoadFailure
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup, KVKind
from pd_connectors.protocol.messages import LeaseRef, SampledToken
from pd_connectors.protocol.ticket import Ticket
from pd_connectors.pull_limits import PullLimits
from pd_connectors.ranked_transport import RankedTransport
from tests.connectors.layouts import full_layout, mixed_heads, over, two_groups
from tests.connectors.rank_wires import VirtualRank

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

LAYOUT = full_layout()  # of tests with one group; the engines here have two
TWO_GROUPS = two_groups(num_kv_heads=1, head_dim=1, window=24)
STATE = KVGroup(KVKind.STATE, (3,), (2, 1, 8), "float32", LAYOUT.block_size)
DRAFTS = KVGroup(KVKind.FULL, (4,), (2, 1, 4), "float32", LAYOUT.block_size, optional=True)
RANKED_GROUPS = (*mixed_heads(window=40).groups, STATE, DRAFTS)
RANK_SILENCE_S = 3.0  # after which an engine notices that a rank is dead, and ends
NUM_BLOCKS = 24
MAX_PROMPT_BLOCKS = 6
FREE = -7.0  # what a free block holds
SHIFT = 5  # between the ids that a block has in one group and in the next
LOAD_DEADLINE_S = 6.0
CONTEXT = ConnectorContext(
    engine_id="",
    epoch=0,
    fingerprint="f",
    layout=LAYOUT,
    cluster_key=b"k",
    host="sim",
    port=0,
    lease_ttl_s=2.0,
    connect_deadline_s=1.5,
    confirm_deadline_s=1.0,
    drain_deadline_s=1.0,
)


Runs = tuple[BlockRun, ...]


def shifted(block: int, group: int) -> int:
    """The id of a block in a group."""
    return (block + SHIFT * group) % NUM_BLOCKS


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Prompt:
    """What the KV of block i of a prompt is: a number that no other (prompt, block) has."""

    number: int
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // LAYOUT.block_size)

    def content(self, block: int) -> float:
        return 1000.0 * self.number + block


@dataclass
class Prefill:
    """A request on P. Its blocks are taken at once."""

    prompt: Prompt
    lease: LeaseRef
    blocks: list[int]
    generation: int = 0
    num_computed: int = 0
    is_begun: bool = False
    is_finished: bool = False


@dataclass
class Load:
    """A request on D, and what the connector said about it."""

    prompt: Prompt
    begun_at: float
    first_block: int
    num_common: int  # groups that P has, too
    events: list[Event] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    failed_at: float | None = None
    is_over: bool = False
    waits_for_blocks: bool = False


def _make_caches(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[CacheDescription]]:
    """The caches by rank, as views of one memory [num_blocks, numbers], so that a block is checked in one operation.

    The second result, [numbers], is what is added to a block's content to get its numbers; the third is the group of
    each number.
    """
    heads = [
        (rank, index, head, prod(group.shape[1:]))
        for rank in range(layout.tp_size)
        for index, group in enumerate(layout.groups)
        for head in group.heads_of(rank, layout.tp_size)
    ]
    pattern = torch.cat([torch.full((size,), index / 4 + head / 32) for _, index, head, size in heads])
    groups = torch.cat([torch.full((size,), index) for _, index, _, size in heads])
    memory = torch.zeros((NUM_BLOCKS, pattern.numel()))
    parts = iter(memory.split([prod(group.rank_shape(layout.tp_size)) for group in layout.groups] * layout.tp_size, 1))  # type: ignore[no-untyped-call]
    caches = [
        tuple(next(parts).unflatten(1, group.rank_shape(layout.tp_size)) for group in layout.groups)
        for _ in range(layout.tp_size)
    ]
    return memory, pattern, groups, [CacheDescription(tensors, layout) for tensors in caches]


class Engine:
    """One node: a connector without its thread, and the model of an engine around it."""

    def __init__(
        self, network: LoopbackNetwork, clock: VirtualClock, port: int, epoch: int, layout: BlockLayout = TWO_GROUPS
    ) -> None:
        self.clock = clock
        self.network = network
        self.layout = layout
        self.node: LoopbackNode = network.attach("sim", port)
        self.memory, self.pattern, self.groups, self.caches = _make_caches(layout)
        # A block of this model is a block of each group. Its id in group g is `shifted`, so no two groups have the same
        self.rows = (torch.arange(NUM_BLOCKS)[:, None] + SHIFT * self.groups) % NUM_BLOCKS
        self.ranks = [VirtualRank(network, rank, cache) for rank, cache in enumerate(self.caches) if rank]
        for block in range(NUM_BLOCKS):
            self.fill(block, FREE)
        self.dies_at = float("inf")  # a rank has died
        ports = tuple(rank.port for rank in self.ranks)
        self.context = replace(
            CONTEXT, layout=layout, engine_id=f"engine-{port}", epoch=epoch, port=port, rank_ports=ports
        )
        transport = RankedTransport(LoopbackTransport(self.node), layout, ports)
        for rank in self.ranks:
            rank.start()
        limits = PullLimits(
            renew_every_s=0.5, silence_s=1.5, read_s=2.0, confirm_s=1.0, confirm_every_s=0.2, max_blocks_per_read=2
        )
        channel = LoopbackChannel(self.node)
        self.connector = PeerToPeerConnector(self.context, transport, channel, clock=clock, limits=limits)
        self.connector.open(self.caches[0])
        self.free = list(range(NUM_BLOCKS))
        self.prefills: dict[str, Prefill] = {}
        self.loads: dict[str, Load] = {}
        self.next_turn = clock.now
        self.paused_until = 0.0
        self.paused_s = 0.0
        self.failures: list[LoadFailure] = []
        self.num_done = 0

    # blocks

    def fill(self, block: int, content: float) -> None:
        """Write a block on every rank; the numbers of groups and heads differ."""
        self.memory.scatter_(0, self.rows[block][None], (content + self.pattern)[None])

    def holds(self, blocks: list[int], content: float | torch.Tensor) -> bool:
        """content: of all numbers of a block, or [numbers]."""
        return bool((self.memory.gather(0, self.rows[blocks]) == content + self.pattern).all())

    def runs(self, blocks: list[int], num_tokens: int, num_computed: int | None = None, first: int = 0) -> Runs:
        """The runs of a handoff, by group. blocks: the prompt's from `first` on; those before it are not named."""
        runs = []
        for index, group in enumerate(self.layout.groups):
            span = group.handed_over(num_tokens, num_computed)
            span = range(min(span.stop, max(span.start, first)), span.stop)
            own = blocks[span.start - first : span.stop - first]
            runs.append(BlockRun(span.start, tuple(shifted(block, index) for block in own)))
        return tuple(runs)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            assert self.holds([block], FREE), "something landed in a free block"
        return taken

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            self.fill(block, FREE)
        self.free += blocks

    def check_free_blocks(self) -> None:
        assert self.holds(self.free, FREE), "something landed in a free block"

    # as P

    def admit(self, prompt: Prompt, *, hold: bool) -> Ticket | None:
        if len(self.free) < prompt.num_blocks:
            return None
        lease = self.connector.leases.open(prompt.num_tokens, hold=hold)
        self.prefills[lease.lease_id] = Prefill(prompt, lease, self.take(prompt.num_blocks))
        return Ticket(
            request_id="r",
            lease=lease,
            generation=0,
            expires_at_s=1e12,
            fingerprint=self.context.fingerprint,
            layout=self.layout,
            prompt_digest=prompt_digest(range(prompt.num_tokens)),
            num_tokens=prompt.num_tokens,
            num_samples=1,
            host="sim",
            port=self.context.port,
        )

    def compute(self, num_blocks: int, *, sample: bool) -> None:
        """A step: the oldest unfinished prefill begins, or goes on by so many blocks. `sample`: its token comes with
        the last, of every second prompt in one announcement."""
        request = next((request for request in self.prefills.values() if not request.is_finished), None)
        if request is None or self.dies_at < float("inf"):
            return  # without a rank no step retires
        if not request.is_begun:
            request.is_begun = True
            self.connector.leases.announce(PublishSpec(request.lease.lease_id, (), 0, request.generation))
            return
        prompt, start = request.prompt, request.num_computed // LAYOUT.block_size
        stop = min(prompt.num_blocks, start + num_blocks)
        for block in range(start, stop):
            self.fill(request.blocks[block], prompt.content(block))
        request.num_computed = min(prompt.num_tokens, stop * LAYOUT.block_size)
        readable = self.runs(request.blocks, prompt.num_tokens, request.num_computed)
        publish = PublishSpec(request.lease.lease_id, readable, request.num_computed, request.generation)
        first_tokens = (SampledToken(prompt.number),)
        request.is_finished = stop == prompt.num_blocks and (start == stop or sample)
        is_one = request.is_finished and start < stop and prompt.number % 2 == 0
        self.connector.leases.announce(replace(publish, first_tokens=first_tokens) if is_one else publish)
        if request.is_finished and not is_one:
            self.connector.leases.finish(request.lease.lease_id, first_tokens)

    def preempt(self) -> None:
        """Take the blocks of the oldest unfinished prefill back, and others for it."""
        request = next((request for request in self.prefills.values() if not request.is_finished), None)
        if request is None or len(self.free) < request.prompt.num_blocks:
            return
        readable = self.runs(request.blocks, request.prompt.num_tokens)
        stale = PublishSpec(request.lease.lease_id, readable, request.prompt.num_tokens, request.generation)
        generation = self.connector.leases.retract(request.lease.lease_id)
        self.connector.leases.announce(stale)  # of a step that was in flight: must be void
        self.give(request.blocks)
        request.blocks = self.take(request.prompt.num_blocks)
        request.num_computed = 0
        request.is_begun = False
        if generation is not None:
            request.generation = generation

    def revoke(self) -> None:
        """End the oldest prefill's lease and reuse its blocks."""
        if self.prefills:
            lease_id = next(iter(self.prefills))
            self.connector.leases.end(lease_id, LeaseEnd.REVOKED)
            self.give(self.prefills.pop(lease_id).blocks)

    # as D

    def begin(self, load_id: str, ticket: Ticket, prompt: Prompt, first_block: int) -> None:
        num_common = self.layout.num_common(ticket.layout)
        self.loads[load_id] = Load(prompt, self.clock.now, first_block, num_common)
        self.submit(lambda reader, now: reader.begin(load_id, ticket, LOAD_DEADLINE_S, now))

    def cancel(self) -> None:
        """Cancel the youngest load, whatever its state."""
        if self.loads:
            load_id = list(self.loads)[-1]
            self.submit(lambda reader, now: reader.cancel(load_id, now))

    def submit(self, command: object) -> None:
        assert callable(command)
        self.connector.submit(command)
        self.next_turn = self.clock.now

    # turns

    def turn(self) -> None:
        for rank in self.ranks:
            rank.turn(self.clock.now)
        self.next_turn = self.clock.now + self.connector.turn()
        for event in self.connector.poll():
            self.on_event(event)
        for load_id, load in self.loads.items():
            if load.waits_for_blocks and not load.is_over:
                self.reserve(load_id, load)

    def on_event(self, event: Event) -> None:
        if isinstance(event, LeaseEnded):
            self.give(self.prefills.pop(event.lease_id).blocks)
            return
        load = self.loads[event.load_id]
        assert not load.is_over, f"{event} after {load.events}"
        earlier = {type(previous) for previous in load.events}
        assert type(event) not in earlier, f"{event} twice"
        load.events.append(event)
        match event:
            case LoadReady(load_id):
                assert LoadFailed not in earlier
                self.reserve(load_id, load)
            case FirstTokens(_, tokens):
                assert LoadFailed not in earlier
                assert tokens == (SampledToken(load.prompt.number),)
            case LoadDone():
                assert {LoadReady, FirstTokens} <= earlier
                assert LoadFailed not in earlier
                self.check_bytes(load)
                self.num_done += 1
                self.end(load)
            case LoadFailed(_, reason, _):
                assert self.clock.now <= load.begun_at + LOAD_DEADLINE_S + self.paused_s + 0.01, "past its deadline"
                load.failed_at = self.clock.now
                load.waits_for_blocks = False
                self.failures.append(reason)
            case LoadDrained():
                assert load.failed_at is not None
                delay_s = self.network.faults.max_delay_s * (3 if self.ranks else 1)  # also to the rank and back
                grace_s = CONTEXT.drain_deadline_s + delay_s + self.paused_s + 0.01
                assert self.clock.now <= load.failed_at + grace_s, "drained too late"
                self.end(load)

    def reserve(self, load_id: str, load: Load) -> None:
        first_block = min(load.first_block, load.prompt.num_blocks)
        count = load.prompt.num_blocks - first_block
        load.waits_for_blocks = len(self.free) < count
        if not load.waits_for_blocks:
            load.blocks = self.take(count)
            num_tokens = load.prompt.num_tokens
            spec = LoadSpec(load_id, self.runs(load.blocks, num_tokens, first=first_block), num_tokens)
            self.submit(lambda reader, now: reader.reserve(spec, now))

    def check_bytes(self, load: Load) -> None:
        """What was handed over is there, and nothing landed in the load's other blocks."""
        first_block = load.prompt.num_blocks - len(load.blocks)
        moved = [group.handed_over(load.prompt.num_tokens) for group in self.layout.groups[: load.num_common]]
        for i, block in enumerate(load.blocks, start=first_block):
            contents = torch.tensor(
                [load.prompt.content(i) if i in span else FREE for span in moved]
                + [FREE] * (len(self.layout.groups) - load.num_common)
            )
            assert self.holds([block], contents[self.groups]), f"stale bytes in {load}"

    def end(self, load: Load) -> None:
        self.give(load.blocks)
        load.blocks = []
        load.is_over = True


class Simulation:
    """`ports` engines. Operations may come in any order and at any time. degrees: their numbers of ranks."""

    def __init__(self, network: LoopbackNetwork, clock: VirtualClock, ports: int, degrees: Sequence[int] = ()) -> None:
        self.network = network
        self.clock = clock
        """Every second engine with ranks has one group less, which is optional."""
        ranked = [over(BlockLayout(RANKED_GROUPS[: -(i % 2) or None]), n) for i, n in enumerate(degrees)]
        layouts = ranked or [TWO_GROUPS] * ports
        self.engines = [Engine(network, clock, port, 1, layout) for port, layout in enumerate(layouts, start=1)]
        self.num_prompts = 0
        self.num_loads = 0
        self.failures: list[LoadFailure] = []
        self.num_done = 0

    def request(self, prefill: int, decodes: list[int], num_tokens: int, first_block: int, *, hold: bool) -> None:
        """The router's work: P admits, a D gets the ticket (or several do, one after another or at once)."""
        self.num_prompts += 1
        prompt = Prompt(self.num_prompts, num_tokens)
        ticket = self.engines[prefill].admit(prompt, hold=hold)
        if ticket is None:
            return
        for decode in decodes:
            self.num_loads += 1
            self.engines[decode].begin(f"load-{self.num_loads}", ticket, prompt, first_block)

    def crash(self, which: int) -> None:
        """A node dies and is back at once, as another epoch under the same address."""
        old = self.engines[which]
        self._count(old)
        for node in (old.node, *(rank.node for rank in old.ranks)):
            self.network.detach(node)
        context = old.context
        self.engines[which] = Engine(self.network, self.clock, context.port, context.epoch + 1, context.layout)

    def kill_rank(self, which: int, rank: int) -> None:
        """A further rank dies at once, and its engine when it has noticed that."""
        engine = self.engines[which]
        engine.ranks[rank - 1].is_dead = True
        self.network.detach(engine.ranks[rank - 1].node)
        engine.dies_at = min(engine.dies_at, self.clock.now + self.network.random.uniform(0.0, RANK_SILENCE_S))

    def pause_rank(self, which: int, rank: int, duration_s: float) -> None:
        """A further rank lags; its memory can still be read."""
        engine = self.engines[which]
        engine.ranks[rank - 1].paused_until = self.clock.now + duration_s
        engine.paused_s += duration_s

    def pause(self, which: int, duration_s: float) -> None:
        """SIGSTOP: the node does nothing, its memory can still be read."""
        engine = self.engines[which]
        engine.paused_until = max(engine.paused_until, self.clock.now + duration_s)
        engine.paused_s += duration_s

    def advance(self, duration_s: float) -> None:
        """Let time pass, turning every node whenever something is due there."""
        until = self.clock.now + duration_s
        for _ in range(200_000):
            due, engine = min(((self._due(engine), engine) for engine in self.engines), key=lambda pair: pair[0])
            if due > until:
                self.clock.now = until
                return
            self.clock.now = max(self.clock.now, due)
            if engine.dies_at <= self.clock.now:
                self.crash(self.engines.index(engine))
                continue
            engine.turn()
            engine.check_free_blocks()
        raise AssertionError("the nodes spin")

    def settle(self) -> None:
        """Finish all work; then nothing may be left."""
        for _ in range(200):
            for engine in self.engines:
                if engine.paused_until <= self.clock.now:
                    engine.compute(MAX_PROMPT_BLOCKS, sample=True)
                    engine.next_turn = self.clock.now
            self.advance(0.1)
        for engine in self.engines:
            left = [load for load in engine.loads.values() if not load.is_over]
            assert not left, f"loads that never ended: {left}"
            assert not engine.prefills, f"leases that never ended: {engine.prefills}"
            assert len(engine.connector.leases) == 0
            assert sorted(engine.free) == list(range(NUM_BLOCKS)), "blocks are missing"
            stats = engine.connector.stats()
            assert stats["loads_open"] == stats["quarantined_blocks"] == 0
            self._count(engine)

    def _due(self, engine: Engine) -> float:
        dues = (engine.next_turn, engine.node.next_due(), *(rank.next_due for rank in engine.ranks))
        return min(engine.dies_at, max(engine.paused_until, min(dues)))

    def _count(self, engine: Engine) -> None:
        self.failures += engine.failures
        self.num_done += engine.num_done


def random_operation(simulation: Simulation, rng: random.Random) -> None:
    """Do something. Requests and steps are much more frequent than disasters."""
    engines = range(len(simulation.engines))
    which = rng.choice(engines)
    engine = simulation.engines[which]
    kind = rng.choices(
        ("request", "compute", "preempt", "revoke", "cancel", "crash", "pause", "kill_rank", "pause_rank"),
        (30, 40, 8, 8, 6, 2, 4, 2 if engine.ranks else 0, 6 if engine.ranks else 0),
    )[0]
    if engine.paused_until > simulation.clock.now and kind not in ("crash", "kill_rank"):
        return
    match kind:
        case "request":
            num_tokens = rng.randint(1, MAX_PROMPT_BLOCKS * LAYOUT.block_size)
            first_block = rng.choice((0, 0, 0, rng.randint(0, MAX_PROMPT_BLOCKS)))
            decodes = [rng.choice(engines) for _ in range(rng.choice((1, 1, 1, 2)))]
            simulation.request(which, decodes, num_tokens, first_block, hold=rng.random() < 0.2)
        case "compute":
            engine.compute(rng.randint(1, 3), sample=rng.random() < 0.7)
            engine.next_turn = simulation.clock.now
        case "preempt":
            engine.preempt()
            engine.next_turn = simulation.clock.now
        case "revoke":
            engine.revoke()
            engine.next_turn = simulation.clock.now
        case "cancel":
            engine.cancel()
        case "crash":
            simulation.crash(which)
        case "pause":
            simulation.pause(which, rng.uniform(0.1, 4.0))
        case "kill_rank":
            simulation.kill_rank(which, rng.randint(1, len(engine.ranks)))
        case "pause_rank":
            simulation.pause_rank(which, rng.randint(1, len(engine.ranks)), rng.uniform(0.05, RANK_SILENCE_S))
