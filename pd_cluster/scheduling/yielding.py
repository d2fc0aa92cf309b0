"""Groups that hold many slots yield slots and blocks to groups that wait with fewer (`turns`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch_builder import BatchBuilder
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.scheduling.turns import Turns

YIELDS_A_STEP = 4  # slots; each sequence that takes one needs some of the step's budget for its prompt


class Yielding:
    """Chooses the sequences that yield, and preempts those that no running step touches.

    Invariant: a sequence is taken only from a group that owes the claimant's group a slot, so each exchange makes the
    two more equal.
    """

    def __init__(self, turns: Turns, queues: Queues, memory: KvMemory) -> None:
        self._turns = turns
        self._queues = queues
        self._memory = memory

    @property
    def _is_due(self) -> bool:
        """Whether a sequence waits and some group may have to yield to it. O(1)."""
        return self._turns.has_rich and self._queues.has_waiting

    def even_out(self, builder: BatchBuilder) -> None:
        """When all slots, or all blocks, are taken, groups with many yield one to each group that waits with fewer."""
        if not self._is_due:
            return
        if self._queues.num_free_slots > 0:
            refused = self._memory.refused
            if refused is not None:
                self._yield_to(refused, builder, wants_slot=False)
            return
        served: set[str] = set()
        while len(served) < YIELDS_A_STEP:
            seq = next((one for one in self._queues.in_turn() if one.request.group.name not in served), None)
            if seq is None or not self._yield_to(seq, builder, wants_slot=True):
                return
            served.add(seq.request.group.name)

    def _yield_to(self, seq: Sequence, builder: BatchBuilder, *, wants_slot: bool) -> bool:
        """Take the slot and blocks that the sequence lacks from groups that owe its group. False: there are none.

        A victim that a running step touches is left out of this step, and yields in the next.
        """
        has_taken, memory = False, self._memory
        taken: list[Sequence] = []  # and still in a running step
        debtors = (other for other in self._queues.running if other.request.group.owes(seq.request.group))
        wanted = [] if seq.table is not None else memory.wanted(seq)
        if not wants_slot and not memory.can_gain(wanted, debtors):
            return False
        num_missing = memory.num_missing(wanted)
        while wants_slot or num_missing > 0 or (wanted and memory.lacks_room(wanted, taken)):
            victim = self.debtor(seq, builder)
            if victim is None:
                return has_taken
            wants_slot, has_taken = False, True
            num_missing -= memory.num_held(victim)
            if victim.num_in_flight:
                builder.held.add(victim.seq_id)
                taken.append(victim)
            else:
                builder.swap_out += memory.preempt(victim)
                builder.preempted = bool(builder.swap_out)  # no step copies blocks both out and in
        return True

    def debtor(self, seq: Sequence, builder: BatchBuilder) -> Sequence | None:
        """The youngest running sequence of a group that owes the sequence's a slot, if this step may take it.

        A PREFILL with a lease is never taken: it ends soon, and its reader would have to start again.
        """
        group = self._turns.richest() if self._turns.has_rich else None
        if group is None or not group.owes(seq.request.group):
            return None
        for other in reversed(self._queues.running):
            request = other.request
            is_free = other.planned_step != builder.step and other.seq_id not in builder.held
            if request.group is group and is_free and request.lease_id is None and other.priority >= seq.priority:
                return other
        return None
