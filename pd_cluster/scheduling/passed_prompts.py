"""Running prompts that prompts of a better priority pass, and the turns that these get nevertheless.

A prompt that runs holds a slot and blocks, and a decode node may have read half of its KV. Without turns, better
prompts that keep coming would hold it there until that node's load deadline. So one of 16 steps in a row that pass it
goes to it first. Better priorities lose a sixteenth of the prompt tokens at most, however many prompts they pass: the
prompt that arrived first has all turns until it is done, so none starves.

A prompt that waits holds nothing, and has no such turns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from pd_cluster.scheduling.sequence import Sequence

MOST_PASSES = 15  # steps in a row in which running prompts are passed


class PassedPrompts:
    """Pure: fed what a step may hold, and what it holds. `prefills`: the running prompts."""

    def __init__(self) -> None:
        self._num_passes = 0

    def of_turn(self, prefills: List[Sequence], best_waiting: int | None) -> Sequence | None:
        """The prompt that goes before better priorities now; None: it is no prompt's turn.

        `best_waiting`: the best priority of the prompts that wait.
        """
        if self._num_passes < MOST_PASSES:
            return None
        priorities = [seq.priority for seq in prefills]
        best = min(priorities if best_waiting is None else [*priorities, best_waiting], default=0)
        passed = (seq for seq in prefills if seq.priority > best)
        return min(passed, key=lambda seq: (seq.request.since, seq.precedence), default=None)

    def note(self, prefills: List[Sequence], best_planned: float, *, is_turn: bool) -> None:
        """A step was planned. `best_planned`: the best priority of its prompts. `is_turn`: a passed one was first."""
        if is_turn:
            self._num_passes = 0
        elif best_planned < math.inf:  # else the step had no prompt, so it was none's turn
            is_passed = any(seq.priority > best_planned for seq in prefills)
            self._num_passes = self._num_passes + 1 if is_passed else 0
