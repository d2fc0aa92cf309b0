"""Which sequences and parked requests get KV blocks, and which give them up.

Sequences that wait and reservations for loads hold no blocks that they could lose, and get blocks strictly by their
claims (`turns`), so that a stream of small requests cannot starve a large one. Running sequences take blocks from the
pinned prefixes of parked requests first, then from the sequence that the planner chooses (`preempt`). Leases and loads
cannot be preempted; each ends within a deadline of its own.
"""

from __future__ import annotations

from itertools import chain
from operator import add
from typing import TYPE_CHECKING

from pd_cluster.scheduling.sequence import KvArrival, SequenceStatus
from pd_cluster.scheduling.step_budget import is_stream
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request, Sequence
    from pd_connectors.base import CachedBlock

PREEMPTIONS = ("preemptions_recompute_total", "preemptions_swap_total")
HITS = ("prefix_cache_queried_tokens_total", "prefix_cache_hit_tokens_total")
WATERMARK_SHARE = 100  # 1 / WATERMARK_SHARE of the blocks is kept for sequences that run already
Copies = list[tuple[int, int, int]]  # (group, from, to) for a BlockCopies


class KvMemory:
    """Gives KV blocks to sequences, and takes blocks back. `LoadMemory` gives some to parked requests.

    Invariants of both:

    - a sequence in `waiting` has no table, one in `loaded` or `running` has one;
    - a parked request has a table: its pinned prefix, and while `kv` is not ABSENT the blocks of its load;
    - `retract` is called with a lease before the blocks of its sequence are freed by a preemption;
    - after a refusal, no request or sequence with a worse claim than the refused one gets blocks for its prompt.
    """

    def __init__(
        self,
        blocks: BlockManager,
        queues: Queues,
        retract: Callable[[str], int | None],
        clock: Callable[[], float],
        prefill_s: Callable[[int, int], float],
    ) -> None:
        """`prefill_s`: the predicted seconds of so many tokens of a prompt, after so many others."""
        self.counters = dict.fromkeys((*PREEMPTIONS, *HITS), 0.0)
        self._blocks = blocks
        self._queues = queues
        self._retract = retract
        self._clock = clock
        self._prefill_s = prefill_s
        # By group. A stream with states takes no more slots: 1% of 900, in 60 GB, would be 580 MB for nothing
        self._watermark = [
            1 if pool.group.kind is KVKind.STATE else max(1, len(pool.refs) // WATERMARK_SHARE) for pool in blocks.pools
        ]
        if blocks.states is not None:
            blocks.states.watermark = self._watermark
        self._refused: Sequence | None = None
        self._news: list[CachedBlock] = []

    # running sequences

    def can_write(self, seq: Sequence) -> bool:
        """Whether the sequence's next token has a block, or can get one."""
        table, start = seq.table, seq.num_scheduled_tokens
        assert table is not None
        return start < table.capacity or self._blocks.can_grow(table, start, start + 1)

    @property
    def is_shared(self) -> bool:
        """Whether several groups share the memory. Then a table that is closed may free no slab, and so not help."""
        return len(self._blocks.pools) > 1

    def needs(self, seq: Sequence, without: Iterable[Sequence] = ()) -> list[int]:
        """The blocks to take by group for a sequence's next token, or for all of its tokens if it has no table.

        `without`: if these gave up theirs. Then it need not copy what it shares with them alone.
        """
        blocks, table, start = self._blocks, seq.table, seq.num_scheduled_tokens
        if table is None:
            return blocks.needs_of(len(seq.token_ids))
        needs = blocks.needs(table, start, start + 1)
        for pool, held in zip(blocks.pools, table.groups, strict=True):
            if pool.num_sharing(held, start) and (others := [other.table for other in without if other.table]):
                closed = chain.from_iterable(other.groups[pool.index].references for other in others)
                needs[pool.index] -= pool.num_sharing(held, start, closed) == 0
        return needs

    def next_needs(self) -> list[int]:
        """The blocks to take by group for the next tokens of all running sequences."""
        needs = [0] * len(self._watermark)
        for seq in self._queues.running:
            if seq.table is not None and seq.num_scheduled_tokens >= seq.table.capacity:
                needs = list(map(add, needs, self.needs(seq)))
        return needs

    def can_gain(self, needs: list[int], victims: Iterable[Sequence], keep: Request | None = None) -> bool:
        """Whether the blocks of these sequences, with the pins of all parked requests but `keep`, make room."""
        if not self.is_shared:
            return True
        tables = chain((victim.table for victim in victims), self._pins(keep))
        return self._blocks.has_room_without(needs, filter(None, tables))

    def _pins(self, keep: Request | None) -> Iterable[BlockTable | None]:
        return (one.table for one in self._queues.parked if one is not keep and one.kv is KvArrival.ABSENT)

    def drop_pin(self, keep: Request | None = None) -> bool:
        """Make the pinned prefix of the last parked request evictable. False: there is none but `keep`'s.

        `reserve` pins again the blocks that are still cached.
        """
        for request in reversed(self._queues.parked):
            table = request.table
            if request is not keep and request.kv is KvArrival.ABSENT and table is not None:
                if not any(held.ids for held in table.groups):
                    continue
                self._blocks.close(table)
                request.table = self._blocks.open_table(reverses=request.may_sit_out)
                return True
        return False

    def preempt(self, seq: Sequence) -> Copies:
        """Take all blocks of a sequence that no running step touches, and make it wait. Returns the copies to run.

        The reader of the sequence's lease, if there is one, learns of the preemption first. The blocks of a sequence
        without a lease are swapped to host memory if host memory has room: the copies do that. Any other sequence is
        computed again.
        """
        request, table, blocks = seq.request, seq.table, self._blocks
        assert table is not None
        assert not seq.num_in_flight
        if request.lease_id is not None and (generation := self._retract(request.lease_id)) is not None:
            request.lease_generation = generation
        self._queues.remove(seq)
        copies: Copies = []
        if request.lease_id is None and blocks.can_swap_out(table, seq.num_computed_tokens):
            copies, seq.host_blocks = blocks.swap_out(table, seq.num_computed_tokens)
            seq.status = SequenceStatus.SWAPPED
            self.counters["preemptions_swap_total"] += 1
        else:
            blocks.close(table)
            seq.num_computed_tokens = 0
            seq.status = SequenceStatus.PREEMPTED
            self.counters["preemptions_recompute_total"] += 1
        seq.table = None
        seq.num_scheduled_tokens = seq.num_computed_tokens
        seq.num_announced_tokens = 0
        if not seq.num_pending:  # else a beam that has nothing to compute before its next token is chosen
            self._queues.add(seq, self.num_cached(seq))
        return copies

    def sit_out(self, seq: Sequence) -> None:
        """See `Sequence.sit_out`."""
        states, table = self._blocks.states, seq.table
        seq.sit_out(seq.num_scheduled_tokens - 1 if states is None or table is None else states.take_back(table))

    # sequences that wait

    @property
    def refused(self) -> Sequence | None:
        """The last waiting sequence that was refused blocks; None: it waits no more, or for its adapter.

        Until it asks again, no sequence or request with a worse claim gets blocks.
        """
        seq, queues = self._refused, self._queues
        return seq if seq is not None and seq in queues.waiting and queues.adapters.is_ready(seq) else None

    def num_missing(self, needs: list[int]) -> int:
        """The least units to free until each group can take so many blocks."""
        return self._blocks.num_units(needs) - self._blocks.num_available

    def num_held(self, seq: Sequence) -> int:
        """The units of a sequence's blocks."""
        return 0 if seq.table is None else self._blocks.num_units([len(held.ids) for held in seq.table.groups])

    def lacks_room(self, needs: list[int], victims: list[Sequence]) -> bool:
        """Whether so many units are not enough where groups share memory, without these running."""
        tables = (victim.table for victim in victims if victim.table)
        return self.is_shared and not self._blocks.has_room_without(needs, tables)

    def wanted(self, seq: Sequence) -> list[int]:
        """The blocks by group with which a waiting sequence can enter beside the running ones' next tokens."""
        blocks, running = self._blocks, self._queues.running
        num_new = sum(one.table is None for one in running)
        num_growing = num_new + sum(
            one.table is not None and one.num_scheduled_tokens >= blocks.end_of(one.table) for one in running
        )
        growing = (num_new if pool.group.kind is KVKind.STATE else num_growing for pool in blocks.pools)
        return [sum(nums) for nums in zip(self.needs(seq), self._watermark, growing, strict=True)]

    def admit(self, seq: Sequence) -> Copies | None:
        """Give a waiting sequence blocks for all of its tokens, so that no prompt is preempted before its end.

        At least one token is left to compute, for its logits. Returns the copies that swap it in, or None: refused.
        """
        copies = self._take_blocks(seq)
        if copies is None:
            self._refused = seq
        return copies

    def _take_blocks(self, seq: Sequence) -> Copies | None:
        claim = seq.request.group.claim(seq.precedence)
        if any(request.claim < claim for request in self._queues.reserving):
            return None
        blocks, size, is_swapped = self._blocks, self._blocks.block_size, seq.status is SequenceStatus.SWAPPED
        table = blocks.open_table(reverses=seq.request.may_sit_out)
        found = self._hold(seq, table)
        if found is None:
            blocks.close(table)
            return None
        start, needs = found
        seq.request.num_named = 0  # some of its blocks may have been evicted since
        copies: Copies = []
        if is_swapped:
            copies = blocks.swap_in(table, seq.host_blocks, needs)
            seq.host_blocks = ()
        else:
            self._name(seq, start // size)
            num_on_device, start = start, self._go_on_in_host(seq, table, start)
            seq.num_computed_tokens = seq.num_scheduled_tokens = start
            self._count_hit(seq, start - num_on_device)
        with blocks.host.bequeath(table):  # it computes all of them itself, in order
            blocks.grow(table, start, len(seq.token_ids))
        seq.table = table
        return copies

    def _hold(
        self, seq: Sequence, table: BlockTable, without: Collection[BlockTable] | None = None
    ) -> tuple[int, list[int]] | None:
        """`hold_with_room` for all tokens of a waiting sequence."""
        blocks, size, is_swapped = self._blocks, self._blocks.block_size, seq.status is SequenceStatus.SWAPPED
        num_kept = seq.num_computed_tokens if is_swapped else seq.num_reusable_tokens

        def hold(num_whole: int) -> int:
            hashes = seq.iter_hashes(num_whole, size)
            if not is_swapped:
                return blocks.match(table, hashes) * size
            blocks.match_runs(table, hashes, num_kept)  # the rest of each group comes from the host
            return num_kept

        return self.hold_with_room(seq.request, table, hold, num_kept // size, len(seq.token_ids), without)

    def fits_without(self, seq: Sequence, tables: Collection[BlockTable]) -> bool:
        """Whether a waiting sequence would get blocks if these tables were closed, and had the best claim."""
        table = self._blocks.open_table(reverses=seq.request.may_sit_out)
        found = self._hold(seq, table, tables)
        self._blocks.close(table)
        return found is not None

    def _go_on_in_host(self, seq: Sequence, table: BlockTable, start: int) -> int:
        """Queue the loads that let a sequence begin after more tokens than the `start` that are on the device."""
        blocks, size = self._blocks, self._blocks.block_size

        def loads_sooner(num_whole: int, num_bytes: int) -> bool:
            has_streams = any(map(is_stream, self._queues.running))
            load_s = blocks.copies.load_s(num_bytes, has_streams=has_streams)
            return load_s < self._prefill_s(num_whole * size - start, start)

        hashes = seq.iter_hashes(seq.num_reusable_tokens // size, size)
        return blocks.match_host(table, hashes, start // size, len(seq.token_ids), loads_sooner) * size

    def hold_with_room(
        self, request: Request, table: BlockTable, hold: Callable[[int], int], num_whole: int, end: int,
        without: Collection[BlockTable] | None = None,
    ) -> tuple[int, list[int]] | None:  # fmt: skip
        """Let a table hold what is cached, if there is room for the rest up to `end`. Returns the rest: start, needs.

        `hold` lets it hold what is cached of so many whole blocks, and returns where the rest begins. When nothing else
        is active it may hold nothing: cached blocks may lie so that no slab is left for another group.
        `without`: if there would be room without these tables; then no pin is dropped.
        """
        for num in (num_whole, 0):
            start = hold(num)
            needs = self._blocks.needs(table, start, end)
            if self._make_room(needs, request) if without is None else self._has_room_without(needs, request, without):
                return start, needs
            if not self._is_nothing_active:
                break
            self._blocks.truncate(table, 0)
        return None

    def num_cached(self, seq: Sequence) -> int:
        """The tokens that a waiting sequence would find cached now; 0 while no router asks for the load."""
        blocks = self._blocks
        if not blocks.news.is_on:
            return 0
        return blocks.num_cached(seq.iter_hashes(seq.num_reusable_tokens // blocks.block_size, blocks.block_size))

    def publish(self, seq: Sequence, table: BlockTable, num_tokens: int) -> list[CachedBlock]:
        """Cache the whole blocks of the first `num_tokens`, which are computed. Returns those that were not known."""
        size = self._blocks.block_size
        news = self._blocks.publish(table, seq.hash_blocks(num_tokens // size, size))
        if seq.request.num_named < len(seq.request.message.steps):
            self._name(seq, self._blocks.num_published(table))
        return news

    def publish_computed(self, seq: Sequence) -> None:
        """Cache the whole blocks that a running sequence has computed. Those that were not known are news.

        Then release the blocks that are dead. Steps that still run read only from the computed tokens on. What a lease
        hands over is kept.
        """
        table, num_computed = seq.table, seq.num_computed_tokens
        assert table is not None
        if self._blocks.prefix_caching:
            self._news += self.publish(seq, table, num_computed)
        is_leased = seq.request.lease_id is not None
        self._blocks.let_go(table, num_computed, seq.num_prompt_tokens if is_leased else None)

    def take_news(self) -> list[CachedBlock]:
        """Returns the computed blocks that were new to the cache since the last call. Their content is certain only
        until the next step is planned, or blocks are reserved."""
        news, self._news = self._news, []
        return news

    def _name(self, seq: Sequence, num_blocks: int) -> None:
        request = seq.request
        if request.num_named < len(steps := request.message.steps):
            hashes = seq.hash_blocks(num_blocks, self._blocks.block_size)
            request.num_named = self._blocks.name(steps, request.num_named, hashes)

    def _count_hit(self, seq: Sequence, num_in_host: int) -> None:
        """Count the prefix-cache hit of a request's first admission. After a preemption it finds its own KV."""
        marks = seq.request.marks
        if marks.scheduled_s is None and marks.loaded_s is None:
            marks.scheduled_s = self._clock()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.counters["prefix_cache_queried_tokens_total"] += seq.num_prompt_tokens
            self.counters["prefix_cache_hit_tokens_total"] += seq.num_cached_tokens
            self._blocks.host.num_hit_tokens += num_in_host

    @property
    def _is_nothing_active(self) -> bool:
        """Whether no sequence runs or has its KV."""
        return not self._queues.running and not self._queues.loaded

    def _with_spare(self, needs: list[int]) -> list[int]:
        return needs if self._is_nothing_active else list(map(add, needs, self._watermark))

    def _has_room_without(self, needs: list[int], claimant: Request, tables: Collection[BlockTable]) -> bool:
        """What `_make_room` would say if these tables were closed."""
        return self._blocks.has_room_without(self._with_spare(needs), chain(filter(None, self._pins(claimant)), tables))

    def _make_room(self, needs: list[int], claimant: Request) -> bool:
        """Whether so many blocks by group can be taken; drops the pins of other parked requests for it, worst first."""
        needs = self._with_spare(needs)
        if self._blocks.has_room(needs):
            return True
        can_gain = self.can_gain(needs, (), claimant)
        while can_gain and self.drop_pin(claimant):
            if self._blocks.has_room(needs):
                return True
        return False
