"""Which sequence is next. Groups share slots and memory, not sequences.

A *group* is what one HTTP request asks for on this node: several prompts, n sequences of each. Nodes cannot tell
clients apart, so one that asks for 256 prompts with n = 64 in one request gets the turns of one request, not of 16,384.

The *claim* of a sequence that waits, smaller first:

    priority    of its request
    slots       that its group holds
    turn        when its group last had one, or the request's (`queue_order`), whichever is later
    arrival     of its request, within the group

So groups take turns: one that has just had a turn stands after all that wait now, before all that come later. A group
of one sequence holds no slot while that waits: among such groups the order is that of `Request.turn`, as it is among
the sequences of one group. First in, first out, that is when the request arrived; shortest first, later by its work.

Invariants, of sequences of equal priority:

    a group takes a slot from another only if that holds at least two more, so each exchange makes them more equal;
    every group that waits with no slot is passed by no group that arrives after its turn: none starves.

Pure policy: it knows neither steps nor blocks.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pd_cluster.scheduling.request_group import LEAST_EXCESS, RequestGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd_cluster.scheduling.request_group import Claim
    from pd_cluster.scheduling.sequence import Request, Sequence

CROWD_SHARE = 2  # 1 / CROWD_SHARE of the queue is for groups that have nothing in it yet


def crowd_limit(limit: int) -> int:
    """How far a queue of `limit` requests may be filled by the second and later ones of a group."""
    return max(1, limit // CROWD_SHARE)


class Turns:
    """All groups of one engine. An ordinary request, with one prompt and n = 1, costs as much as in a plain queue."""

    def __init__(self) -> None:
        self.num_queued = 0  # requests of which nothing has run yet
        self._groups: dict[str, RequestGroup[Sequence]] = {}
        self._shared: dict[RequestGroup[Sequence], None] = {}  # in the order in which they came
        self._num_rich = 0  # groups from which another may take a slot
        self._last_arrival = -1
        self._serial = 0

    # requests

    def may_queue(self, name: str, limit: int) -> bool:
        """Whether a request of the group `name` may join the queue, which holds at most `limit` requests.

        A group's first queued request may take the last place. The later ones may fill the queue only up to
        `crowd_limit`, so that places are left for groups without a queued request.
        """
        group = self._groups.get(name)
        return self.num_queued < (limit if group is None or not group.num_queued else crowd_limit(limit))

    def join(self, request: Request, name: str) -> RequestGroup[Sequence]:
        """Add a request that has arrived, as queued. Returns its group."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = RequestGroup(name)
        group.num_requests += 1
        group.num_queued += 1
        self.num_queued += 1
        self._last_arrival = request.since
        if group.num_requests > 1 or request.num_live > 1:
            group.is_shared = True
            self._shared[group] = None
        return group

    def leave(self, request: Request) -> None:
        """Remove a request that has ended."""
        group = request.group
        self.begin(request)
        group.num_requests -= 1
        if not group.num_requests:
            del self._groups[group.name]
            self._shared.pop(group, None)

    def begin(self, request: Request) -> None:
        """Note that the request is not queued any more. Idempotent."""
        if request.is_queued:
            request.is_queued = False
            request.group.num_queued -= 1
            self.num_queued -= 1

    def note_turn(self, request: Request) -> None:
        """Note that the request's group was given a slot, or memory."""
        group = request.group
        if group.is_shared:
            self._serial += 1
            group.last_turn = (self._last_arrival, self._serial)

    # slots

    def take_slot(self, request: Request) -> None:
        """Note that one of the request's sequences has a slot."""
        group = request.group
        self.begin(request)
        group.num_slots += 1
        self._num_rich += group.num_slots == LEAST_EXCESS
        self.note_turn(request)

    def return_slot(self, request: Request) -> None:
        """Note that one of the request's sequences has given its slot back."""
        group = request.group
        self._num_rich -= group.num_slots == LEAST_EXCESS
        group.num_slots -= 1

    @property
    def has_rich(self) -> bool:
        """Whether some group holds so many slots that one without any may take one from it. O(1)."""
        return self._num_rich > 0

    def richest(self) -> RequestGroup[Sequence] | None:
        """The group with the most slots, of equal ones the oldest. O(groups of several sequences)."""
        return max(self._shared, key=lambda group: group.num_slots, default=None)

    # order

    def in_turn(self, ordered: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences of `ordered`, which come by precedence and are all that wait, in order of their claims.

        A slot that is given meanwhile counts. Lazy: O(1) for the first of groups of one sequence, O(log groups) for
        those of others.
        """
        if not self._shared:
            yield from ordered
            return
        heads = [
            (group.claim(first.precedence), first.precedence, first, queue)
            for group in self._shared
            if (first := next(queue := iter(tuple(group.waiting)), None)) is not None
        ]
        heapify(heads)
        for seq in ordered:
            group = seq.request.group
            if group.is_shared:
                continue  # in `heads`
            while heads and heads[0][0] < group.claim(seq.precedence):
                yield from self._next_of(heads)
            yield seq
        while heads:
            yield from self._next_of(heads)

    @staticmethod
    def _next_of(heads: list[tuple[Claim, tuple[int, ...], Sequence, Iterator[Sequence]]]) -> Iterator[Sequence]:
        """The first of the group with the best claim; its next one takes its place, with the claim it has then."""
        _, _, seq, queue = heappop(heads)
        yield seq
        following = next(queue, None)
        if following is not None:
            claim = following.request.group.claim(following.precedence)
            heappush(heads, (claim, following.precedence, following, queue))
