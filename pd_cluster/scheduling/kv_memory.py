"""Which sequences and parked requests get KV blocks, and which give them up.

Sequences that wait and reservations for loads hold no blocks that they could lose, and get blocks strictly by their
claims (`turns`), so that a stream of small requests cannot starve a large one. Running sequences take blocks from the
pinned prefixes of parked requests first, then from the sequence that the planner chooses (`preempt`). Leases and loads
cannot be preempted; each ends within a deadline of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.scheduling.sequence import KvArrival, SequenceStatus
from pd_connectors.base import LoadSpec

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Gives KV blocks to sequences and parked requests, and takes the blocks back.

    Invariants:

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
        step_tokens: int,
    ) -> None:
        """`step_tokens`: the most of one step."""
        self.counters = dict.fromkeys((*PREEMPTIONS, *HITS), 0.0)
        self._blocks = blocks
        self._queues = queues
        self._retract = retract
        self._clock = clock
        self._step_tokens = step_tokens
        self._watermark = [max(1, len(pool.refs) // WATERMARK_SHARE) for pool in blocks.pools]  # by group
        self._refused: Sequence | None = None
        self._news: list[CachedBlock] = []

    # running sequences

    def can_write(self, seq: Sequence, num_tokens: int = 1) -> bool:
        """Whether the sequence's next tokens have blocks, or can get them."""
        table, start = seq.table, seq.num_scheduled_tokens
        assert table is not None
        end = start + num_tokens
        return end <= table.capacity or self._blocks.can_grow(table, start, end)

    def drop_pin(self, keep: Request | None = None) -> bool:
        """Make the pinned prefix of the worst-ranked parked request evictable. False: there is none but `keep`'s.

        `reserve` pins again the blocks that are still cached.
        """
        for request in reversed(self._queues.parked):
            table = request.table
            if request is not keep and request.kv is KvArrival.ABSENT and table is not None:
                if not any(held.ids for held in table.groups):
                    continue
                self._blocks.close(table)
                request.table = self._blocks.open_table()
                return True
        return False

    def num_held(self, seq: Sequence) -> int:
        """The units that a sequence holds."""
        return 0 if seq.table is None else self._blocks.units_of(seq.table)

    def preempt(self, seq: Sequence) -> Copies:
        """Take all blocks of a sequence that no running step touches, and make it wait. Returns the copies to run.

        The reader of the sequence's lease, if there is a lease, hears of the preemption first. The blocks of a sequence
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

    # sequences that wait

    @property
    def refused(self) -> Sequence | None:
        """The last waiting sequence that was refused blocks; None: it waits no more.

        Until it asks again, no sequence or request with a worse claim gets blocks.
        """
        seq = self._refused
        return seq if seq is not None and seq in self._queues.waiting else None

    def num_missing(self, seq: Sequence) -> int:
        """The units to free until a waiting sequence can enter beside the running ones' next tokens.

        At least one while it could not: units may be free in slabs of another group.
        """
        blocks, num_tokens = self._blocks, len(seq.token_ids)
        num_growing = sum(
            one.table is None or one.num_scheduled_tokens >= blocks.reach(one.table) for one in self._queues.running
        )
        most = (pool.most_held(num_tokens, self._step_tokens) for pool in blocks.pools)
        wanted = [num + spare + num_growing for num, spare in zip(most, self._watermark, strict=True)]
        num_missing = blocks.units(wanted) - blocks.num_available
        return num_missing if num_missing > 0 or blocks.has_room(wanted) else 1

    def admit(self, seq: Sequence) -> Copies | None:
        """Give a waiting sequence blocks for all of its tokens, so that no prompt is preempted before its end.

        In groups of which blocks die: for those of its next step, because later ones may take the place of dead ones.
        At least one token is left to compute, for its logits. Returns the copies that swap it in, or None: refused.
        """
        copies = self._take_blocks(seq)
        if copies is None:
            self._refused = seq
        return copies

    def _take_blocks(self, seq: Sequence) -> Copies | None:
        claim = seq.request.group.claim(seq.rank)
        if any(request.claim < claim for request in self._queues.reserving):
            return None
        blocks, num_tokens, is_swapped = self._blocks, len(seq.token_ids), seq.status is SequenceStatus.SWAPPED
        table = blocks.open_table()
        reusable = seq.num_computed_tokens if is_swapped else seq.num_reusable_tokens
        num_cached = blocks.match(table, seq.iter_hashes(reusable // blocks.block_size, blocks.block_size))
        start = seq.num_computed_tokens if is_swapped else num_cached * blocks.block_size
        if is_swapped:
            blocks.let_go(table, start)
        reach = min(num_tokens, start + self._step_tokens)
        needs = blocks.needs(table, start, num_tokens, reach)
        if not self._make_room(needs, seq.request):
            is_compact = self._compact(table, num_tokens)
            blocks.close(table)
            return self._take_blocks(seq) if is_compact else None
        seq.request.num_named = 0  # some of its blocks may have been evicted since
        self._name(seq, num_cached)
        copies: Copies = []
        if is_swapped:
            copies = blocks.swap_in(table, seq.host_blocks, needs)
            seq.host_blocks = ()
        else:
            seq.num_computed_tokens = seq.num_scheduled_tokens = start
            self._count_hit(seq)
        blocks.grow(table, start, num_tokens, reach)
        seq.table = table
        return copies

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
        if seq.request.lease_id is not None:
            num_computed = min(num_computed, seq.num_prompt_tokens - 1)
        self._blocks.let_go(table, num_computed)

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

    def _count_hit(self, seq: Sequence) -> None:
        """Count the prefix-cache hit of a request's first admission. After a preemption it finds its own KV."""
        marks = seq.request.marks
        if marks.scheduled_s is None and marks.loaded_s is None:
            marks.scheduled_s = self._clock()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.counters["prefix_cache_queried_tokens_total"] += seq.num_prompt_tokens
            self.counters["prefix_cache_hit_tokens_total"] += seq.num_cached_tokens

    def _make_room(self, needs: list[int], claimant: Request) -> bool:
        """Whether so many blocks by group can be taken; drops the pins of other parked requests for it, worst first."""
        if self._queues.running or self._queues.loaded:
            needs = [need + spare for need, spare in zip(needs, self._watermark, strict=True)]
        while not self._blocks.has_room(needs):
            if not self.drop_pin(claimant):
                return False
        return True

    # parked requests

    def pin(self, request: Request) -> int:
        """Pin the cached prefix of a parked prompt. Returns the number of whole blocks.

        Only the kept part of the prompt counts: all of it when no logits of it are needed. A redraw, which may be known
        only after the first pin, writes into the last token's block, which must not be a cached one.
        """
        assert request.table is not None
        size = self._blocks.block_size
        num_whole = request.num_kept_tokens // size
        self._blocks.truncate(request.table, num_whole)
        return self._blocks.match(request.table, request.sequences[0].iter_hashes(num_whole, size))

    def _compact(self, table: BlockTable, num_tokens: int) -> bool:
        """Forget all that is cached and unused, and all blocks of the table, if a sequence then has room alone.

        The blocks of a cached prefix may lie so that no slab is left for another group.
        """
        blocks, pools = self._blocks, self._blocks.pools
        if len(pools) == 1 or self._queues.running or self._queues.loaded:
            return False
        blocks.truncate(table, 0)
        is_used = any(pool.cache.num_evictable for pool in pools)
        has_room = blocks.has_room([pool.most_held(num_tokens, self._step_tokens) for pool in pools])
        if is_used and has_room:
            blocks.forget_unused()
        return is_used and has_room

    def missing(self, request: Request) -> tuple[list[bytes], int]:
        """The hashes of a parked prompt's whole blocks, to search a pool for, and how many of them are cached here.

        The block of the last token is left out, because it must be computed for its logits. ([], 0): do not search.
        """
        size = self._blocks.block_size
        num_whole = request.sequences[0].num_reusable_tokens // size
        num_here = self.pin(request)
        if num_here >= num_whole or not self._blocks.prefix_caching:
            return [], 0
        return request.sequences[0].hash_blocks(num_whole, size)[:], num_here

    def reserve(self, request: Request, prefix: int | None) -> LoadSpec | None:
        """Reserve blocks for the part of a parked prompt that is not cached. Returns None when they are refused.

        `prefix`: reserve for the first `prefix` tokens only.
        """
        blocks, table = self._blocks, request.table
        assert request.load_id is not None
        assert table is not None
        num_cached = self.pin(request) * blocks.block_size
        num_tokens = request.num_loaded_tokens
        if prefix is not None:  # more of the prompt may be cached since the search found `prefix`
            num_tokens = max(prefix, num_cached)
        self._queues.stop_reserving(request)
        if not self._is_next(request):
            self._queues.refuse(request)
            return None
        if not self._make_load_room(request, table, num_cached, num_tokens, prefix):
            if self._compact(table, num_tokens):
                return self.reserve(request, prefix)
            self._queues.refuse(request)
            return None
        blocks.grow(table, num_cached, num_tokens)
        request.kv = KvArrival.WRITING
        request.sequences[0].num_cached_tokens = num_cached
        return LoadSpec(request.load_id, blocks.uncached_runs(table), num_tokens)

    def _make_load_room(
        self, request: Request, table: BlockTable, num_cached: int, num_tokens: int, prefix: int | None
    ) -> bool:
        """Release what is cached and dead behind the load, and make room for what is not cached."""
        if prefix is None:
            self._blocks.keep_handed_over(table, num_tokens)
        else:
            self._blocks.let_go(table, num_tokens)
        return self._make_room(self._blocks.needs(table, num_cached, num_tokens), request)

    def _is_next(self, request: Request) -> bool:
        """Whether no refused request or sequence has a better claim."""
        claim, refused = request.claim, self.refused
        if any(other.claim < claim for other in self._queues.reserving):
            return False
        return refused is None or claim < refused.request.group.claim(refused.rank)

    def keep_prefix(self, request: Request, num_tokens: int) -> None:
        """Cache the first `num_tokens` of a loaded prefix, and free the rest of its blocks."""
        assert request.table is not None
        lead, size = request.sequences[0], self._blocks.block_size
        num_blocks = max(lead.num_cached_tokens, num_tokens) // size
        self._blocks.truncate(request.table, num_blocks)
        self.publish(lead, request.table, num_blocks * size)
        self._blocks.drop_mortal(request.table)  # less may have come than its end needs: `pin` finds what is enough
        request.kv = KvArrival.ABSENT
        lead.num_cached_tokens = 0  # counted when it is scheduled, or loaded

    def keep_prompt(self, request: Request) -> None:
        """Cache the kept part of a prompt. Its load is confirmed."""
        assert request.table is not None
        lead, num_kept = request.sequences[0], request.num_kept_tokens
        num_cached = lead.num_cached_tokens
        self.publish(lead, request.table, num_kept)
        request.kv = KvArrival.PRESENT
        for seq in request.sequences:
            seq.num_cached_tokens = min(num_cached, seq.num_prompt_tokens)  # known tokens may be cached too
            seq.num_external_tokens = num_kept - num_cached

    def quarantine(self, request: Request) -> None:
        """Take the blocks of a failed load, which may still write, out of use until `BlockManager.drain`."""
        assert request.load_id is not None
        assert request.table is not None
        self._blocks.quarantine(request.load_id, request.table)
        request.kv = KvArrival.ABSENT

    def close(self, request: Request) -> None:
        """Release the table of a request that is not parked any more. Idempotent."""
        if request.table is not None:
            self._blocks.close(request.table)
            request.table = None
