"""A scheduler with everything around it faked: worker, readers of leases, loads, clients. Driven by the tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import inf
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.config import SchedulerConfig
from pd_cluster.engine.admission import Admission
from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.scheduling.adapter_places import AdapterPlaces
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.block_table import StateSlots
from pd_cluster.scheduling.cache_news import block_id as feed_id
from pd_cluster.scheduling.drafts import Speculation
from pd_cluster.scheduling.queue_order import Fifo, Shortest
from pd_cluster.scheduling.scheduler import Scheduler, Update
from pd_cluster.scheduling.sequence import Request, Sequence
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.targets import AIM, Targets
from pd_connectors.protocol.feed import DEVICE
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from pd_connectors.protocol.messages import SampledToken
from tests.scheduling.draft_watch import watch
from tests.scheduling.flat_model import flat_model
from tests.scheduling.kv_groups import ONE_FULL, GroupSet
from tests.scheduling.simulated_client import Client
from tests.scheduling.simulation import (
    BLOCK_SIZE,
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    FakeWorker,
    SeedDrafter,
    candidates,
    history,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.protocol.messages import AddRequest
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_connectors.base import LoadSpec, PublishSpec
    from pd_connectors.protocol.feed import StoredBlock


# Chunks without drafts (sequence, start, tokens), departures, numbers of copies
Plan = tuple[set[tuple[int, int, int]], set[int], tuple[int, ...]]


def steps_of(message: AddRequest) -> tuple[tuple[int, int], ...]:
    """Names for every other block of the prompt."""
    ends = range(BLOCK_SIZE, len(message.prompt_token_ids) + 1, 2 * BLOCK_SIZE)
    return tuple((end, hash((message.salt, *message.prompt_token_ids[:end])) % 2**64) for end in ends)


@cache
def hashes_of(salt: str, token_ids: tuple[int, ...]) -> list[bytes]:
    """Of each whole block. A world checks some sequences thousands of times: to hash was a third of a check."""
    return extend_hashes(root_hash(salt), token_ids, BLOCK_SIZE)


def is_hit(
    blocks: BlockManager, hashes: list[bytes], end: int, *, in_host: bool = False, with_victims: bool = False
) -> bool:
    """Whether a prompt can be continued after its first `end` blocks, by what each group's cache has.

    `in_host`: or its host memory. `with_victims`: or will have, if the save that is due is in time.
    """
    num_tokens = end * blocks.block_size
    victims = {one for own in blocks.host.victims.values() for _, one in own.values()} if with_victims else ()
    for pool in blocks.pools:
        if num_tokens % pool.block_size:
            return False
        needed = range(pool.group.first_block(num_tokens), num_tokens // pool.block_size)
        own = hashes[pool.ratio - 1 :: pool.ratio]
        device, host = pool.cache._by_hash, blocks.host.groups[pool.index].cached if in_host else ()
        if any(own[index] not in device and own[index] not in host and own[index] not in victims for index in needed):
            return False
    return True


@dataclass
class World:
    """`depth` 2: a step is scheduled and started before the result of the one before it is known.

    `longest_run`: of tokens that one step samples for a sequence; more than one needs `depth` 1.
    """

    num_blocks: int = 32
    kv: GroupSet = ONE_FULL
    num_host_blocks: int = 0
    host_cache: bool = False
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_waiting: int = 64
    most_tokens: int = 0  # of a step beside decodes, before it is cut to a captured size; 0: no limit
    keys_per_token: int = 0
    tpot_s: float = 0.0  # a target, in place of the limit; a step takes a second
    model: StepModel = field(default_factory=StepModel)
    shortest_first: bool = False
    prefix_caching: bool = True
    depth: int = 1
    longest_run: int = 1
    drafts: bool = False
    num_slots: int = 0  # of adapters
    num_bent: int = 1  # of five drafts: see SeedDrafter
    are_late: Callable[[], bool] = lambda: False  # see FakeWorker
    is_unready: Callable[[int], bool] = lambda seq_id: False  # the worker's answer before each plan
    hashes: bool = True  # whether every second step leaves time for it
    forgets: bool = False  # a request's sequences when it has ended, as the core does; tests may want to see them
    clients: dict[str, Client] = field(default_factory=dict)
    loads: dict[str, tuple[LoadSpec, Request]] = field(default_factory=dict)  # in progress, or not drained
    leases: dict[str, Request] = field(default_factory=dict)
    published: dict[str, PublishSpec] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.filled: dict[int, str] = {}  # slot -> adapter
        self.slot_of: dict[int, int] = {}  # by sequence
        self.num_victims = 0  # saved
        groups, slabs = self.kv.groups(BLOCK_SIZE), self.kv.slabs(self.num_blocks)
        self.blocks = BlockManager(
            groups, slabs, num_host_blocks=self.num_host_blocks, host_cache=self.host_cache,
            prefix_caching=self.prefix_caching,
        )  # fmt: skip
        self.blocks.host.gb_s, self.blocks.copies.wait_s = inf, 0.0  # whatever is there is loaded
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_waiting=self.max_waiting,
            ),
            self.blocks,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            retract=self._retract,
            step_budget=self._step_budget(),
            order=Shortest(self.model, self.blocks) if self.shortest_first else Fifo(),
            clock=lambda: self.now_s,
            speculation=Speculation(SeedDrafter(self.num_bent)) if self.drafts and not self.kv.has_state else None,
            adapters=AdapterPlaces(self.num_slots),
        )
        self.admission = Admission(
            self.blocks, max_num_seqs=self.max_num_seqs, max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}),
            check_sampling=lambda sampling: None,
        )  # fmt: skip
        if (drafting := self.scheduler._drafting) is not None:
            watch(drafting)
        self.blocks.news.switch(is_on=True)
        self.named: dict[int, StoredBlock] = {}  # as a router knows them
        self.prefixes: dict[bytes, list[bytes]] = {}  # hashes of what was asked for in whole blocks, by the last
        self.worker = FakeWorker(
            self.max_num_seqs, self.max_num_batched_tokens, self.longest_run, self.are_late, groups, slabs.per_slab
        )
        self.unready = frozenset[int]()  # in the newest step
        self._running: deque[tuple[Batch, StepResult]] = deque()
        self._load_ids = count()

    def _step_budget(self) -> StepBudget:
        targets, model = Targets(), self.model
        if self.tpot_s:
            targets = Targets(self.tpot_s, self.tpot_s, 3 * self.tpot_s)
        elif self.most_tokens:
            # one more, because what a chunk costs is rounded up
            targets, model = Targets(itl_s=(self.most_tokens + 1.5) / AIM), flat_model(self.keys_per_token)
        return StepBudget(targets, model, lambda: self.now_s, lambda: float(len(self._running)))

    def _retract(self, lease_id: str) -> int:
        """The blocks are still the lease's at this moment."""
        [seq] = self.leases[lease_id].heads
        assert seq.table is not None
        assert seq.table.groups[0].ids
        self.read_lease(lease_id)
        self.published.pop(lease_id, None)
        self.preempted.append(seq)
        return seq.request.lease_generation + 1

    # clients

    def request(self, message: AddRequest) -> Request:
        lease_id = f"lease-{message.request_id}" if message.work is Work.PREFILL else None
        return Request.from_message(message, lease_id=lease_id)

    def submit(self, message: AddRequest) -> Request:
        """Validate and admit. Raises what the scheduler raises."""
        self.admission.validate(message)
        request = self.request(msgspec.structs.replace(message, steps=steps_of(message)))
        if message.work is Work.TAKE_OVER:
            self.scheduler.park(request)
        else:
            self.scheduler.add(request)
        if request.lease_id is not None:
            self.leases[request.lease_id] = request
        outputs = [list(known) for known in message.known] or [[] for _ in range(message.sampling.n)]
        self.clients[request.request_id] = Client(request, outputs, [None] * message.sampling.n)
        hashes = hashes_of(message.salt, tuple(message.prompt_token_ids))
        self.prefixes |= {hashes[end - 1]: hashes[:end] for end in range(1, len(hashes) + 1)}
        return request

    def take(self, *updates: Update | None) -> None:
        for update in updates:
            if update is not None:
                self.clients[update.request.request_id].take(update)
                if update.finished and self.forgets:
                    update.request.sequences = []

    def client(self, request: Request) -> Client:
        return self.clients[request.request_id]

    # steps

    def start_step(self) -> Batch:
        """Schedule one step and run it; its result is known `depth` - 1 steps later."""
        if self._running:
            self.scheduler.sit_out(self._running[-1][1].absent)
        self._ask_readiness()
        batch = self.scheduler.schedule()
        copies = batch.copies.swap_out, batch.copies.swap_in, batch.copies.copy_on_write
        self._check_side_copies(batch)
        tokens = {(chunk.seq_id, chunk.start, chunk.num_tokens - len(chunk.drafts)) for chunk in batch.chunks}
        self.plans.append((tokens, set(batch.departures), tuple(map(len, copies))))
        if self.hashes and batch.step % 2:
            self.scheduler.hash_ahead()
        self._check_writes(batch)
        self._check_adapters(batch)
        drawn = {chunk.seq_id for chunk in batch.chunks if chunk.num_samples}
        assert not drawn & self.unready, "a sequence that is not ready is drawn"
        self.now_s += 1
        if batch.loads:
            self.settle()  # transfers are not ordered with steps
        self._running.append((batch, self.worker.execute(batch)))
        while len(self._running) >= self.depth:
            self._retire()
        return batch

    def _ask_readiness(self) -> None:
        """As the core does. What misses its deadline ends."""
        wanted = self.scheduler.unready.wanted
        self.unready = frozenset(filter(self.is_unready, wanted))
        for seq_id in self.scheduler.unready.note_ready(frozenset(wanted) - self.unready, self.now_s):
            if (request := self.scheduler.request_of(seq_id)) is not None:
                self.stop(request)

    def stop(self, request: Request, index: int | None = None) -> None:
        """Abort a request or one of its sequences. A lease ends first."""
        lease_id = request.lease_id or ""
        ends = all(seq.finish_reason is not None or index in (None, seq.index) for seq in request.sequences)
        if lease_id in self.leases and ends:
            self.read_lease(lease_id)
            self.published.pop(lease_id, None)
            del self.leases[lease_id]
        self.take(self.scheduler.abort(request, index, FinishReason.ABORT))

    def _check_adapters(self, batch: Batch) -> None:
        """Each chunk finds its adapter in its slot, which has none while it is filled, also where a step still runs."""
        self.slot_of |= {start.seq_id: start.adapter for start in batch.starts}
        self.filled |= dict.fromkeys((slot for slot, _ in batch.adapters), "?")
        for chunk in batch.chunks:
            request = self.scheduler._queues.sequences[chunk.seq_id].request
            assert self.filled.get(self.slot_of[chunk.seq_id], "") == request.message.adapter
        self.filled |= dict(batch.adapters)

    def _check_writes(self, batch: Batch) -> None:
        """A block that a step writes has one holder, and neither the prefix cache nor a lease's reader knows it."""
        for chunk in batch.chunks:
            seq = self.scheduler._queues.sequences[chunk.seq_id]
            table, publish = seq.table, self.published.get(seq.request.lease_id or "")
            assert publish is None or chunk.start >= publish.num_tokens, "an announced token is written"
            assert table is not None
            end = chunk.start + chunk.num_tokens
            for pool, held in zip(self.blocks.pools, table.groups, strict=True):
                if isinstance(held, StateSlots):
                    states = chunk.states
                    written = held.ids if states is None else [states.slot, *(slot for _, slot in states.saves)]
                    assert [states.slot if states else held.ids[0]] == held.ids
                    assert all(pool.refs[slot] == 1 and slot not in pool.cache for slot in written), "a shared slot"
                    assert states is None or states.source < 0 or pool.refs[states.source], "a source is let go"
                    continue
                assert held.first <= pool.group.first_block(chunk.start), "a block that is read is let go"
                first, stop = chunk.start // pool.block_size - held.first, pool.blocks_for(end) - held.first
                assert 0 <= first < stop <= len(held.ids)
                for block_id in held.ids[first:stop]:
                    assert pool.refs[block_id] == 1, f"block {block_id} is shared, and written"
                    assert block_id not in pool.cache, f"block {block_id} is cached, and written"

    def _check_side_copies(self, batch: Batch) -> None:
        """What runs beside the step touches no block that it writes, and loads nothing that it reads."""
        written = set[tuple[int, int]]()
        held = set[tuple[int, int]]()
        for chunk in batch.chunks:
            table = self.scheduler._queues.sequences[chunk.seq_id].table
            assert table is not None
            assert table not in self.blocks.copies.pending, "a sequence is computed while its blocks are loaded"
            for pool, one in zip(self.blocks.pools, table.groups, strict=True):
                held |= {(pool.index, block_id) for block_id in one.ids}
                if isinstance(one, StateSlots):
                    held |= {(pool.index, slot) for slot in one.references}
                    saves = chunk.states.saves if chunk.states else ()
                    written |= {(pool.index, slot) for slot in (*one.ids, *(slot for _, slot in saves))}
                    continue
                first = max(0, chunk.start // pool.block_size - one.first)
                end = pool.blocks_for(chunk.start + chunk.num_tokens) - one.first
                ids = one.ids[first:] if chunk.num_samples else one.ids[first:end]  # a run may go on
                written |= {(pool.index, block_id) for block_id in ids}
        written |= {(group, to) for group, _, to in batch.copies.copy_on_write + batch.copies.swap_in}
        copies_alone = bool(batch.copies.save) and not batch.chunks
        assert batch.copies.may_outlast or not (batch.copies.load or copies_alone)
        for group, device, _ in batch.copies.save:
            pool = self.blocks.pools[group]
            holders = [table for table in self.blocks._tables if device in table.groups[group].ids]
            is_victim = pool.refs[device] == 1 and len(holders) == 1 and len(self.blocks.pools) == 1
            self.num_victims += device not in pool.cache
            assert device in pool.cache or is_victim, "a save of a block that is not cached, and no victim"
            assert (group, device) not in written, "a block is saved and written in one step"
        targets = {copy[::2] for copy in batch.copies.load}
        assert not targets & (held | written), "a block is loaded and read in one step"

    def settle(self) -> None:
        while self._running:
            self._retire()

    def _retire(self) -> None:
        batch, result = self._running.popleft()
        self.worker.side.finish(batch.step)
        for publish in self.scheduler.publishes(batch, result):
            request = self.leases.get(publish.lease_id)
            if request is not None and publish.generation == request.lease_generation:
                num_prompt = len(request.prompt_token_ids)
                assert publish.num_tokens == num_prompt or publish.num_tokens % BLOCK_SIZE == 0
                due = [pool.group.handed_over(num_prompt, publish.num_tokens) for pool in self.blocks.pools]
                assert [run.span for run in publish.runs] == due
                self.published[publish.lease_id] = publish
        for update in self.scheduler.update(batch, result):
            self.take(update)
            lease_id = update.request.lease_id
            if lease_id is not None and update.finished:
                assert self.published[lease_id].num_tokens == len(update.request.prompt_token_ids)

    def run_until_idle(self, limit: int = 2000, *, readers_come: bool = False, check_each: int = 1) -> None:
        """Every step must do something, until nothing is left. `check` follows each of so many.

        `readers_come`: a lease ends as soon as its prompt is computed. Else it holds its memory, perhaps all, for ever.
        """
        for number in range(limit):
            if readers_come:
                for lease_id in [one for one, request in self.leases.items() if request.finished]:
                    self.end_lease(lease_id)
            if not self.scheduler.has_work:
                self.settle()
            if not self.scheduler.has_work:
                return
            batch = self.start_step()
            assert batch.moves_worker or batch.loads or self.depth > 1 or self.unready, "the scheduler is stuck"
            if number % check_each == 0:
                self.check()
        raise AssertionError(f"not idle after {limit} steps")

    # loads

    def reserve(self, request: Request, *, redraws: bool = False) -> LoadSpec | None:
        """`redraws`: the load's P samples under other parameters, so that its first tokens are not taken."""
        request.redraws = redraws and not request.is_parted and not self.kv.has_state
        request.load_id = f"load-{next(self._load_ids)}"
        load = self.scheduler.reserve(request)
        if load is not None:
            self.loads[load.load_id] = (load, request)
            for pool, run in zip(self.blocks.pools, load.runs, strict=True):
                needed = pool.group.handed_over(load.num_tokens)
                assert needed.start <= run.first_block
                assert run.span.stop == needed.stop
        return load

    def first_tokens(self, request: Request) -> tuple[SampledToken, ...]:
        """What P would sample."""
        client = self.client(request)
        if request.sampling.beams is not None:
            return (candidates(history(request.prompt_token_ids)[-1]),)
        return tuple(SampledToken(client.expected(index)[0][0]) for index in range(request.sampling.n))

    def give_first_tokens(self, request: Request) -> None:
        if not request.redraws:
            self.take(self.scheduler.set_first_tokens(request, self.first_tokens(request)))

    def finish_load(self, load: LoadSpec) -> None:
        """All bytes are in and confirmed."""
        _, request = self.loads.pop(load.load_id)
        self.write_load(load, request, good=True)
        if request.finished:
            self.scheduler.drain(load.load_id)
        else:
            self.scheduler.admit_loaded(request)

    def write_load(self, load: LoadSpec, request: Request, *, good: bool) -> None:
        known = request.message.known
        self.worker.side.finish(self.scheduler._planner._next_step)  # a transfer begins when the steps have retired
        self.worker.write_load(load, [*request.prompt_token_ids, *(known[0] if known else ())], good=good)

    def fail_load(self, load: LoadSpec) -> None:
        """It has failed; what is under way may still land until `drain`."""
        self.scheduler.drop_load(self.loads[load.load_id][1])

    def drain(self, load: LoadSpec) -> None:
        _, request = self.loads.pop(load.load_id)
        self.write_load(load, request, good=False)
        self.scheduler.drain(load.load_id)

    # leases

    def read_lease(self, lease_id: str) -> None:
        """What was announced and not taken back is there."""
        publish = self.published.get(lease_id)
        if publish is not None:
            prompt = self.leases[lease_id].prompt_token_ids
            self.worker.expect_runs(publish.runs, history(prompt)[: publish.num_tokens], lease_id)
            for pool, run in zip(self.blocks.pools, publish.runs, strict=False):
                assert all(pool.refs[block_id] for block_id in run.block_ids), "an announced block is let go"

    def end_lease(self, lease_id: str) -> None:
        self.read_lease(lease_id)
        self.published.pop(lease_id, None)
        del self.leases[lease_id]
        self.take(self.scheduler.end_lease(lease_id))

    def check(self) -> None:
        self.blocks.check()
        if self.scheduler.idle:
            self.scheduler.check()
        stats = self.blocks.stats()
        assert stats.free + stats.cached + stats.in_use == stats.num_blocks
        assert stats.leased + stats.quarantined <= stats.in_use
        for lease_id in self.published:
            self.read_lease(lease_id)
        self.check_load()
        self.check_names()
        self.check_hashes()
        self.check_spare()

    def check_load(self) -> None:
        """What routers are told is what can be counted."""
        load, queues = self.scheduler.load, self.scheduler._queues
        num_tokens, num_keys = 0, 0
        for seq in (*queues.waiting, *queues.loaded, *queues.running):
            target, done = len(seq.token_ids) - seq.request.is_parted, seq.num_computed_tokens
            rest = seq.num_queued_tokens
            num_tokens += rest
            num_keys += rest * (2 * target - rest - 1) // 2  # the sum of all before `target` from `target - rest` on
            if seq in queues.waiting and rest != max(0, target - done):
                assert (target - rest) % BLOCK_SIZE == 0, "what it would find cached are blocks"
            elif seq not in queues.waiting:
                sat_out = seq.num_output_tokens > 0 and target - done == 1  # a decode is no queued token
                assert rest == max(0, target - done) or (sat_out and not rest)
        assert load.queued_tokens == num_tokens
        assert abs(load.queued_keys - num_keys) <= num_tokens, "half a token for each"
        live = [seq for c in self.clients.values() for seq in c.request.sequences if seq.finish_reason is None]
        assert queues.num_live == len(live)
        streams = [seq for seq in live if seq.request.work not in (Work.PREFILL, Work.READ)]
        assert queues.num_context == sum(max(seq.num_prompt_tokens, len(seq.token_ids)) for seq in streams)
        assert queues.num_promised == sum(seq.max_len for seq in streams)
        assert load.num_running == len(queues.running)
        stats = self.blocks.stats()
        most = load.free_blocks * BLOCK_SIZE
        assert self.blocks.has_room(self.blocks.needs_of(most)), "another sequence has them"
        assert not self.blocks.has_room(self.blocks.needs_of(most + 1))
        if len(self.blocks.pools) == 1:
            assert load.free_blocks == stats.free + stats.cached

    def check_spare(self) -> None:
        """A sequence holds blocks of known and scheduled tokens only, but for the drafts of a running step."""
        for seq in self.scheduler._queues.sequences.values():
            if seq.table is not None and not (seq.num_in_flight and (seq.num_uncertain or seq.is_absent)):
                most = max(len(seq.token_ids), seq.num_scheduled_tokens)
                for pool, held in zip(self.blocks.pools, seq.table.groups, strict=True):
                    assert isinstance(held, StateSlots) or held.end <= pool.blocks_for(most), (
                        "a block of a draft that was not accepted"
                    )

    def check_hashes(self) -> None:
        """Every hash is that of tokens that the sequence has."""
        for seq in self.scheduler._queues.sequences.values():
            known = hashes_of(seq.request.salt, tuple(seq.token_ids[: len(seq.token_ids) // BLOCK_SIZE * BLOCK_SIZE]))
            assert seq.block_hashes == known[: len(seq.block_hashes)]
            assert len(seq.block_hashes) <= len(known)

    def check_names(self) -> None:
        """A router knows named hits, and no other. With one tree: all of them.

        A name in host memory stays where a block before it was evicted unsaved, and while the save is due.
        """
        evicted, stored, moved = self.blocks.news.take()
        for block in evicted:
            del self.named[block]
        for one in stored:
            assert one.block not in self.named
            self.named[one.block] = one
        for block, tier in moved:
            self.named[block] = msgspec.structs.replace(self.named[block], tier=tier)
        hits = {
            feed_id(hashes[-1])
            for hashes in self.prefixes.values()
            if is_hit(self.blocks, hashes, len(hashes), in_host=True, with_victims=True)
        }
        for hashes in self.prefixes.values():
            if (named := self.named.get(feed_id(hashes[-1]))) is not None:
                assert (named.tier == DEVICE) == is_hit(self.blocks, hashes, len(hashes)), "a name in another tier"
        for pool, own in zip(self.blocks.pools, self.blocks.host.groups, strict=True):
            hits |= {feed_id(one) for one in own.cached if pool.is_tree}
        hits |= {feed_id(one) for victims in self.blocks.host.victims.values() for _, one in victims.values()}
        assert self.named.keys() <= hits
        for seq in self.scheduler._queues.running:
            for num_tokens, _ in seq.request.message.steps:
                if self.kv.has_mortal or seq.table is None:
                    break
                if num_tokens <= len(seq.table.groups[0].path) * BLOCK_SIZE:
                    block = feed_id(seq.hash_blocks(num_tokens // BLOCK_SIZE, BLOCK_SIZE)[-1])
                    assert self.named[block].num_tokens == num_tokens

    def check_empty(self) -> None:
        """Nothing is left but the prefix cache."""
        self.check()
        assert self.scheduler.idle
        assert self.blocks.idle
        assert self.blocks.stats().in_use == 0
        assert not self.worker.rows
        for client in self.clients.values():
            assert client.terminal, f"{client.request.request_id} got no terminal update"
            client.check()
