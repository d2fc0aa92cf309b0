"""Which parked requests get KV blocks for their loads. A reservation gets them by its claim, as `KvMemory` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.scheduling.sequence import KvArrival
from pd_connectors.base import LoadSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request


class LoadMemory:
    """Pins what is cached of parked prompts, and gives their loads blocks for the rest."""

    def __init__(self, blocks: BlockManager, queues: Queues, memory: KvMemory) -> None:
        self._blocks, self._queues, self._memory = blocks, queues, memory

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

    def missing(self, request: Request) -> tuple[list[bytes], tuple[int, ...]]:
        """The hashes of a parked prompt's whole blocks, to search a pool for, and by group up to which block of its own
        it is cached here. That is pinned.

        The block of the last token is left out, because it must be computed for its logits. ([], ()): do not search. So
        it is where the host memory has the rest, which is loaded when the prompt is admitted.
        """
        blocks, table = self._blocks, request.table
        num_whole = request.sequences[0].num_reusable_tokens // blocks.block_size
        num_here = self.pin(request)
        if num_here >= num_whole or not blocks.prefix_caching:
            return [], ()
        assert table is not None
        request.num_cached_before = num_here * blocks.block_size
        hashes = request.sequences[0].hash_blocks(num_whole, blocks.block_size)[:]
        if blocks.num_cached(hashes) == num_whole * blocks.block_size:
            return [], ()
        blocks.match_runs(table, hashes, request.num_cached_before)  # a group may have more than all have
        return hashes, tuple(held.end for held in table.groups)

    def reserve(self, request: Request, prefix: int | None) -> LoadSpec | None:
        """Reserve blocks for the part of a parked prompt that is not cached. Returns None when they are refused.

        `prefix`: reserve for the first `prefix` tokens only, which a search has found. It is given up, with a load of
        nothing, if host memory has as much, or if blocks die and less is cached than at the search: the pool was not
        asked for what was cached then.
        """
        blocks, table = self._blocks, request.table
        assert request.load_id is not None
        assert table is not None
        num_cached = self.pin(request) * blocks.block_size
        num_tokens = request.num_loaded_tokens
        if prefix is not None:  # more of the prompt may be cached since the search found `prefix`
            is_given_up = num_cached < request.num_cached_before and blocks.has_mortal
            hashes = request.sequences[0].iter_hashes(num_tokens // blocks.block_size, blocks.block_size)
            is_here = prefix <= blocks.num_cached(hashes)  # in host memory
            num_tokens = num_cached if is_given_up or is_here else max(prefix, num_cached)
        self._queues.stop_reserving(request)
        request.sequences[0].num_cached_tokens = num_cached
        if not self._is_next(request) or not self._take_load_blocks(request, num_tokens, is_prefix=prefix is not None):
            self._queues.refuse(request)
            return None
        request.kv = KvArrival.WRITING
        return LoadSpec(request.load_id, blocks.uncached_runs(table), num_tokens)

    def _take_load_blocks(self, request: Request, num_tokens: int, *, is_prefix: bool) -> bool:
        """Give a load its blocks: in each group those after its own longest cached run. False: there is no room."""
        table = request.table
        assert table is not None
        if not self._hold(request, table, num_tokens, is_prefix=is_prefix):
            return False
        if not any(held.ids for held in table.groups):  # also where what is cached left no room for the rest
            request.sequences[0].num_cached_tokens = 0
        self._blocks.grow(table, num_tokens, num_tokens)
        return True

    def fits_without(self, request: Request, tables: Collection[BlockTable]) -> bool:
        """Whether the load of a whole prompt would get blocks if these tables were closed, and had the best claim."""
        assert request.table is not None
        table = self._blocks.open_table(reverses=request.may_sit_out)
        without = (*tables, request.table)  # it gives up its pins for what `table` holds
        fits = self._hold(request, table, request.num_loaded_tokens, is_prefix=False, without=without)
        self._blocks.close(table)
        return fits

    def _hold(
        self, request: Request, table: BlockTable, num_tokens: int, *, is_prefix: bool,
        without: Collection[BlockTable] | None = None,
    ) -> bool:  # fmt: skip
        """`KvMemory.hold_with_room` for a load."""
        blocks, size = self._blocks, self._blocks.block_size

        def hold(num_whole: int) -> int:
            hashes = request.sequences[0].iter_hashes(num_whole, size)
            blocks.match_runs(table, hashes, num_tokens, is_handoff=not is_prefix)
            return num_tokens

        num_whole = min(request.num_kept_tokens, num_tokens) // size
        return self._memory.hold_with_room(request, table, hold, num_whole, num_tokens, without) is not None

    def _is_next(self, request: Request) -> bool:
        """Whether no refused request or sequence has a better claim."""
        claim, refused = request.claim, self._memory.refused
        if any(other.claim < claim for other in self._queues.reserving):
            return False
        return refused is None or claim < refused.request.group.claim(refused.precedence)

    def keep_prefix(self, request: Request, num_tokens: int) -> None:
        """Cache the first `num_tokens` of a loaded prefix, and free the rest of its blocks."""
        assert request.table is not None
        lead, size = request.sequences[0], self._blocks.block_size
        self._blocks.drop_targets(request.table, num_tokens // size)
        self._memory.publish(lead, request.table, num_tokens)
        request.kv = KvArrival.ABSENT
        lead.num_cached_tokens = 0  # counted when it is scheduled, or loaded

    def keep_prompt(self, request: Request) -> None:
        """Cache the kept part of a prompt. Its load is confirmed."""
        assert request.table is not None
        lead, num_kept = request.sequences[0], request.num_kept_tokens
        num_cached = lead.num_cached_tokens
        self._memory.publish(lead, request.table, num_kept)
        request.kv = KvArrival.PRESENT
        for seq in request.sequences:
            seq.num_cached_tokens = min(num_cached, seq.num_prompt_tokens)  # known tokens may be cached too
            seq.num_external_tokens = num_kept - num_cached

    def hand_over(self, request: Request) -> None:
        """Give each sequence that goes on the blocks of its loaded prompt, and let it wait for a slot."""
        assert request.table is not None
        for seq in request.heads:
            seq.table = self._blocks.fork(request.table)
            seq.num_computed_tokens = seq.num_scheduled_tokens = request.num_kept_tokens
            seq.awaits_first_decode = True
            self._queues.add(seq)

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
