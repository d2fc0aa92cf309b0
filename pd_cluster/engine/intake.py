"""What a decode node knows of a request until the KV of its prompt is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.engine.redraw import Redraw
    from pd_cluster.scheduling.sequence import Request


@dataclass(slots=True, eq=False)
class Intake:
    """One TAKE_OVER request until its KV is here, or is computed here."""

    request: Request
    num_attempts: int = 0
    has_searched: bool = False  # the pool was asked
    load_id: str | None = None  # None: asking
    lender: str = ""  # the node of its lease
    is_ready: bool = False  # P has announced blocks; ours are reserved as soon as memory allows
    redraw: Redraw | None = None  # None: the load's first tokens are adopted
