"""Which blocks of one load were read, are being read, and are still to be read, group by group. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_connectors.base import LoadSpec
    from pd_connectors.protocol.layout import BlockLayout, BlockRun
    from pd_connectors.protocol.messages import LeaseState
    from pd_connectors.pull_limits import PullLimits
    from pd_connectors.transport import GroupIds


@dataclass(frozen=True, slots=True)
class PostRead:
    """Read P's blocks `remote` into our blocks `local`, by group and pair by pair. Report the end with
    `read_ended(number, ...)`."""

    number: int
    remote: GroupIds
    local: GroupIds


class BlockReads:
    """The reads of one load. Each takes the next blocks of every group; a WINDOW group has none but the last ones.

    `layout` is ours: the peer's degree says nothing about how many bytes our ranks read.
    """

    def __init__(self, layout: BlockLayout, limits: PullLimits) -> None:
        self._groups = layout.groups  # from `start` on those that are read: the first ones
        self._block_bytes = [layout.tp_size * group.rank_bytes(layout.tp_size) for group in layout.groups]
        self._limits = limits
        self._runs: tuple[BlockRun, ...] = ()  # ours, of the groups that are read; () until `start`
        self._num_tokens = 0
        self._next: list[int] = []  # by group; prompt blocks before this one need no further read
        self._in_flight: dict[int, list[int]] = {}  # number of the read -> blocks by group
        self._num_read = [0] * len(layout.groups)  # blocks
        self.num_posted = 0  # reads

    @property
    def is_busy(self) -> bool:
        """True while a posted read has not ended."""
        return bool(self._in_flight)

    @property
    def is_done(self) -> bool:
        """True when every block that `start` named has been read."""
        return not self._in_flight and self._next == [run.span.stop for run in self._runs]

    @property
    def wants_blocks(self) -> bool:
        """True when `start` named blocks that are to be read."""
        return any(run.block_ids for run in self._runs)

    @property
    def has_read(self) -> bool:
        """True when some blocks have been read."""
        return any(self._num_read)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """The bytes that all our ranks have read, by group. Heads that several ranks hold count for each of them."""
        return tuple(count * size for count, size in zip(self._num_read, self._block_bytes, strict=True))

    @property
    def num_blocks_in_flight(self) -> int:
        """Blocks of the engine, of all groups, that a posted read may still write."""
        return sum(map(sum, list(self._in_flight.values())))  # a copy: stats come from other threads

    def start(self, spec: LoadSpec, num_groups: int | None = None) -> None:
        """Set our blocks, which are reserved. The peer's endpoint has the first `num_groups` of ours; None: all."""
        self._runs, self._num_tokens = spec.runs[:num_groups], spec.num_tokens
        self._groups = self._groups[: len(self._runs)]
        self._next = [run.first_block for run in self._runs]

    def post(self, state: LeaseState) -> list[PostRead]:
        """Returns the reads that are possible now, within the limits, and counts them as in flight. Call `start` first.

        Raises ValueError when P announced more tokens than blocks.
        """
        if not state.num_tokens_readable:
            return []
        stops, size = self._readable(state), self._limits.max_blocks_per_read
        posts = []
        while len(self._in_flight) < self._limits.max_reads:
            ends = [max(start, min(stop, start + size)) for start, stop in zip(self._next, stops, strict=True)]
            parts = list(map(range, self._next, ends))
            if not any(parts):
                break
            self._next = ends
            theirs, ours = self._ids(state.runs, parts), self._ids(self._runs, parts)
            posts.append(PostRead(self.num_posted, theirs, ours))
            self._in_flight[self.num_posted] = [len(part) for part in parts]
            self.num_posted += 1
        return posts

    def ended(self, number: int, *, is_good: bool) -> bool:
        """Note the end of a read; with `is_good` its bytes are in. Returns False if no such read was in flight."""
        blocks = self._in_flight.pop(number, None)
        if blocks is not None and is_good:
            for group, count in enumerate(blocks):
                self._num_read[group] += count
        return blocks is not None

    def _readable(self, state: LeaseState) -> list[int]:
        """The first prompt block that cannot be read yet, by group. Raises ValueError as `post` does."""
        lacking = self._groups[len(state.runs) :]
        if lacking and (self.num_posted or any(not group.optional for group in lacking)):  # a read of it may be posted
            raise ValueError(f"the prefill node announced blocks of {len(state.runs)} groups, not {len(self._groups)}")
        num_groups = len(state.runs)  # P may hand over fewer, as long as those that it does not are optional
        self._groups, self._runs = self._groups[:num_groups], self._runs[:num_groups]
        del self._next[num_groups:]
        num_computed = min(self._num_tokens, state.num_tokens_readable)
        stops = []
        for group, run, start in zip(self._groups, state.runs, self._next, strict=False):
            stop = group.handed_over(self._num_tokens, num_computed).stop
            if run.span.stop < stop or run.first_block > min(start, stop):
                raise ValueError("the prefill node announced more tokens than blocks")
            stops.append(stop)
        return stops

    def _ids(self, runs: tuple[BlockRun, ...], parts: list[range]) -> GroupIds:
        """The ids of these blocks, by every group of ours."""
        return tuple(run.ids_of(part) for run, part in zip(runs, parts, strict=False)) + ((),) * (
            len(self._num_read) - len(parts)
        )
