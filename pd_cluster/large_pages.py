"""Memory that takes no room before it is written, in large pages where the machine has them.

The interpreter's lock is held while memory is given back. That takes less of it with large pages.
"""

from __future__ import annotations

import mmap
from contextlib import suppress


def large_pages(num_bytes: int) -> mmap.mmap:
    """Raises OSError, ValueError, OverflowError."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Pinned pages would be copied at once into a process that is forked, and large pages are pinned faster
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):
            memory.madvise(advice)
    return memory
