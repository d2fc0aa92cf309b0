"""What groups that hold many slots yield to those that wait with fewer (`turns`): slots, blocks, some of the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch_builder import BatchBuilder
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.planner import Planner
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.scheduling.turns import Group

YIELDS_A_STEP = 4  # slots; each that takes one needs some of the step's budget for its prompt


class Yielding:
    """Part of the planner. `rests`: a step with many rows takes much longer than one with few, as on a CPU."""

    def __init__(self, planner: Planner, blocks: BlockManager, *, rests: bool) -> None:
        self._planner = planner
        self._blocks = blocks
        self._rests = rests
        self._has_rested = False  # in the last step

    def resting(self) -> Group | None:
        """The group whose sequences sit the next step out, so that what waits with fewer slots is not held up by them.

        A step of 64 sequences takes 40 ms on a CPU core, and one with a short prompt alone 5. In every other step at
        most: those that rest go on, whatever comes.
        """
        planner = self._planner
        group = None
        if (
            self._rests
            and not self._has_rested
            and planner.turns.anyone_is_rich
            and (planner.waiting or planner.loaded)
        ):
            first, richest = next(planner.in_turn(), None), planner.turns.richest()
            if first is not None and richest is not None and richest.owes(first.request.group):
                group = richest
        self._has_rested = group is not None
        return group

    def even_out(self, draft: BatchBuilder) -> None:
        """Where all slots, or all memory, are taken, groups that hold many yield one to each that waits with fewer."""
        if self._planner.num_free_slots > 0:
            short = self._planner.short_of_memory
            if short is not None and short in self._planner.waiting:
                self._yield_to(short, draft, wants_slot=False)
            return
        served: set[str] = set()
        while len(served) < YIELDS_A_STEP:
            seq = next((one for one in self._planner.in_turn() if one.request.group.name not in served), None)
            if seq is None or not self._yield_to(seq, draft, wants_slot=True):
                return
            served.add(seq.request.group.name)

    def _yield_to(self, seq: Sequence, draft: BatchBuilder, *, wants_slot: bool) -> bool:
        """Take a slot and blocks that other groups owe the sequence's, as far as it lacks them. False: there are none.
        A sequence that a step still runs is left out of this one, and yields in the next."""
        blocks, num_missing, has_taken = self._blocks, 0, False
        if seq.table is None:
            num_growing = sum(
                one.num_scheduled_tokens >= len(one.block_ids) * blocks.block_size for one in self._planner.running
            )
            num_wanted = blocks.blocks_for(len(seq.token_ids)) + self._planner.watermark + num_growing
            num_missing = num_wanted - blocks.num_available
        while wants_slot or num_missing > 0:
            victim = self.debtor(seq, draft)
            if victim is None:
                return has_taken
            wants_slot, has_taken = False, True
            num_missing -= len(victim.block_ids)
            if victim.num_in_flight:
                draft.held.add(victim.seq_id)
            else:
                self._planner.preempt(victim, draft)
                draft.preempted = bool(draft.swap_out)  # no step copies blocks both out and in
        return True

    def debtor(self, seq: Sequence, draft: BatchBuilder) -> Sequence | None:
        """The youngest running sequence of a group that owes the sequence's a slot, if this step may take it. No prompt
        with a lease is taken: it ends soon, and its reader would have to begin again."""
        planner = self._planner
        group = planner.turns.richest() if planner.turns.anyone_is_rich else None
        if group is None or not group.owes(seq.request.group):
            return None
        for other in reversed(planner.running):
            request = other.request
            is_free = other.planned_step != draft.step and other.seq_id not in draft.held
            if request.group is group and is_free and request.lease_id is None and request.rank[0] >= seq.rank[0]:
                return other
        return None
