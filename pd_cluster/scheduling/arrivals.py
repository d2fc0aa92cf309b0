"""Which requests the scheduler takes in, and what each gets at its arrival."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from pd_cluster.errors import Overloaded
from pd_cluster.scheduling.turns import crowd_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.drafts import Drafting
    from pd_cluster.scheduling.queue_order import QueueOrder
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request
    from pd_cluster.scheduling.turns import Turns


class Arrivals:
    """Refuses requests that the queue has no place for, and numbers the others and their sequences."""

    def __init__(
        self,
        queues: Queues,
        turns: Turns,
        order: QueueOrder,
        clock: Callable[[], float],
        drafting: Drafting | None,
        *,
        max_waiting: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._queues, self._turns, self._order, self._clock, self._drafting = queues, turns, order, clock, drafting
        self._max_waiting, self.max_model_len, self._eos_token_ids = max_waiting, max_model_len, eos_token_ids
        self._numbers, self._seq_ids = count(), count()

    def begin(self, request: Request) -> None:
        """Take in a request, which `Scheduler.add` or `park` then queues. Raises Overloaded."""
        # a stream that was cut must not fail where new requests wait: it may queue up to twice the limit
        turns, limit = self._turns, self._max_waiting * (2 if request.message.known else 1)
        if not turns.may_queue(request.message.group or request.request_id, limit):
            raise Overloaded(
                f"{turns.num_queued} prompts are waiting; the queue holds {limit}, one request's {crowd_limit(limit)}"
            )
        request.begin(next(self._numbers), self._clock(), self._seq_ids, self._eos_token_ids, self.max_model_len)
        self._order.place(request)
        self._queues.join(request)
        if self._drafting is not None:
            self._drafting.expect(request)
        if request.sampling.grammar:
            for seq in request.sequences:
                self._queues.unready.add(seq)
