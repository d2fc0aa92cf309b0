"""When a process that serves streams looks for garbage: as good as never.

What the step loop makes is freed by its last reference, so there is next to nothing to find. But a step makes more
objects than CPython lets pass between two searches, each search moves those that happen to be alive towards the oldest
generation, and that is searched in turn, with every cached block and every prompt in it, while all streams stand still.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

YOUNG_OBJECTS = 20_000  # more than there are of one step, at four of each of 1024 sequences; CPython's default is 700


@contextmanager
def rare_searches() -> Iterator[None]:
    """Leave what lives already out of all searches, and search when as many objects as say `YOUNG_OBJECTS` are new."""
    young, *older = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
