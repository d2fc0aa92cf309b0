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
    """Read P's blocks `remote` into our blocks `local`, both by group and pair by pair; answer with
    `read_ended(number, ...)`."""

    number: int
    remote: GroupIds
    local: GroupIds


class BlockReads:
    """The reads of one load. Each takes the next blocks of every group, so that a load ends in all groups at once."""

    def __init__(self, layout: BlockLayout, limits: PullLimits) -> None:
        self._groups = layout.groups
        self._limits = limits
        self._spec: LoadSpec | None = None
        self._next = [0] * len(self._groups)  # prompt blocks before this one need no further read
        self._in_flight: dict[int, tuple[int, ...]] = {}  # number of the read -> blocks by group
        self._num_read = [0] * len(self._groups)  # blocks
        self.num_posted = 0  # reads

    @property
    def is_busy(self) -> bool:
        """A posted read has not ended."""
        return bool(self._in_flight)

    @property
    def is_done(self) -> bool:
        """Every block that `start` named is in."""
        spec = self._spec
        return spec is not None and not self._in_flight and self._next == [run.span.stop for run in spec.runs]

    @property
    def has_read(self) -> bool:
        """Some blocks are in."""
        return any(self._num_read)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """That are in, by group."""
        return tuple(count * group.block_bytes for count, group in zip(self._num_read, self._groups, strict=True))

    @property
    def num_blocks_in_flight(self) -> int:
        """Blocks of the engine that a posted read may still write: a block has one id in all groups."""
        return sum(map(max, list(self._in_flight.values())))  # a copy: stats come from other threads

    def start(self, spec: LoadSpec) -> None:
        """Our blocks are reserved."""
        self._spec = spec
        self._next = [run.first_block for run in spec.runs]

    def post(self, state: LeaseState) -> list[PostRead]:
        """The reads that are possible now, within the limits.

        Raises ValueError when P announced more tokens than blocks.
        """
        spec = self._spec
        if spec is None or not state.num_tokens_readable:
            return []
        num_tokens = spec.num_tokens
        readable = min(num_tokens, state.num_tokens_readable)
        stops = [group.handed_over(num_tokens, readable).stop for group in self._groups]
        self._check(state.runs, stops)
        posts = []
        while len(self._in_flight) < self._limits.max_reads:
            parts = [
                range(start, max(start, min(stop, start + self._limits.max_blocks_per_read)))
                for start, stop in zip(self._next, stops, strict=True)
            ]
            if not any(parts):
                break
            remote = tuple(run.ids_of(part) for run, part in zip(state.runs, parts, strict=True))
            local = tuple(run.ids_of(part) for run, part in zip(spec.runs, parts, strict=True))
            posts.append(PostRead(self.num_posted, remote, local))
            self._in_flight[self.num_posted] = tuple(map(len, parts))
            self._next = [part.stop for part in parts]
            self.num_posted += 1
        return posts

    def _check(self, runs: tuple[BlockRun, ...], stops: list[int]) -> None:
        if len(runs) != len(stops):
            raise ValueError(f"the prefill node announced blocks of {len(runs)} groups, not {len(stops)}")
        for run, start, stop in zip(runs, self._next, stops, strict=True):
            if run.span.stop < stop or run.first_block > min(start, stop):
                raise ValueError("the prefill node announced more tokens than blocks")

    def ended(self, number: int, *, is_good: bool) -> bool:
        """A read is terminal; with `is_good` its bytes are in. False: there is no such read in flight."""
        blocks = self._in_flight.pop(number, None)
        if blocks is None:
            return False
        if is_good:
            self._num_read = [count + new for count, new in zip(self._num_read, blocks, strict=True)]
        return True
