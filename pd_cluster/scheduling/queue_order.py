"""In which order prompts of equal priority wait, before groups take turns (`turns`).

**Shortest** orders by predicted seconds of prefill, less AGEING times the age. All prompts age alike, so that is the
order of arrival + seconds / AGEING, which never changes while a prompt waits. A prompt of s seconds is passed only by
prompts that arrive at most s / AGEING after it, and each of those is shorter than it: none starves.
A request that gets its KV from another node has nothing to compute here; its place is that of its arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pd_cluster.protocol.messages import Work

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.sequence import Request
    from pd_cluster.scheduling.step_model import StepModel

AGEING = 0.25
MICROS = 1_000_000


class QueueOrder(Protocol):
    """Gives a request that has begun its place among those that wait."""

    def place(self, request: Request) -> None:
        """Call it once, before the request is in any queue."""


class Fifo:
    """The order of arrival, which `Request.begin` has set."""

    def place(self, request: Request) -> None:
        pass


class Shortest:
    """The least work first, with ageing. Cached tokens are not work."""

    def __init__(self, model: StepModel, blocks: BlockManager) -> None:
        self._model = model
        self._blocks = blocks

    def place(self, request: Request) -> None:
        since = round(request.marks.begun_s * MICROS)
        seconds = 0.0 if request.work is Work.TAKE_OVER else self._prefill_s(request)
        request.set_place(since, since + round(seconds * MICROS / AGEING))

    def _prefill_s(self, request: Request) -> float:
        lead, size = request.sequences[0], self._blocks.block_size
        num_tokens = len(lead.token_ids)
        num_cached = self._blocks.num_cached(lead.iter_hashes(lead.num_reusable_tokens // size, size))
        return self._model.prefill_s(num_tokens - num_cached, num_cached)
