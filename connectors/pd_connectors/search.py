"""One search of a pool, from `find` to its PrefixLoaded, which is emitted once, on the way to `over`:

    state     held by             ends with
    queued    a loading thread    reached after its deadline                              -> over
    probing   a loading thread    nothing stored, the store is gone                       -> over
                                  PrefixFound                                             -> found
    found     the engine          `load`                                                  -> queued, then reading
    reading   a loading thread    every block read, or the first that is lost or damaged,
                                  the store is gone                                       -> over
    any       the watch           `cancel`; the deadline, unless the engine has it        -> over

An object is written into the cache only after its digest was checked, and never once the search is over. So the engine
knows which blocks are whole, even when a loading thread hangs in the store and returns much later.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.base import LoadSpec
    from pd_connectors.block_staging import Inlet
    from pd_connectors.head_parts import HeadPart
    from pd_connectors.prefix_plan import PlacedBlock


class Miss(StrEnum):
    """Why a search loaded fewer blocks than it was asked for. Each such search is counted under one reason."""

    ABSENT = "absent"  # the next block was never stored, or was evicted before the search
    LOST = "lost"  # it was there at the probe and gone at the read
    DAMAGED = "damaged"  # its digest is wrong
    UNAVAILABLE = "unavailable"  # the store is down
    LATE = "late"  # the deadline passed
    CANCELLED = "cancelled"  # the request ended


@dataclass(slots=True, eq=False)
class Search:
    """The pool's lock guards the fields; `land` and `finish` have a lock of their own."""

    load_id: str
    hashes: Sequence[bytes]  # of the prompt, from its start
    first_blocks: Sequence[int]  # by group, blocks before these are in the engine's cache
    due_s: float
    spec: LoadSpec | None = None  # None until `load`
    order: list[PlacedBlock] = field(default_factory=list)  # the spec's blocks, as they are read
    miss: Miss | None = None  # why it will bring less than all
    is_found: bool = False  # the engine has it, and its time does not count
    is_cancelled: bool = False
    is_over: bool = False
    num_read: int = 0  # of `order`, whole blocks
    _landing: threading.Lock = field(default_factory=threading.Lock)
    _inlet: Inlet | None = None

    def land(self, inlet: Inlet, part: HeadPart, block_id: int, content: memoryview, *, is_last: bool) -> bool:
        """Write the next object; with `is_last` its block is whole. False, and nothing is written, when the search is
        over."""
        with self._landing:
            if not self.is_over:
                self._inlet = inlet
                inlet.write(part.group, part.heads, block_id, content)
                self.num_read += is_last
            return not self.is_over

    def finish(self) -> bool:
        """End the search: all writes have landed, and no other follows. False when it had ended already."""
        with self._landing:
            if self.is_over:
                return False
            self.is_over = True
            if self._inlet is not None:
                self._inlet.flush()
            return True

    def why_end(self, now_s: float) -> Miss | None:
        """The reason for which the watch must end the search now; None: none."""
        if self.is_cancelled:
            return Miss.CANCELLED
        return Miss.LATE if not self.is_found and now_s >= self.due_s else None
