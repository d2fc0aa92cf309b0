"""The share of one step for each shared group, on a CPU, where a step with much work delays all other groups.

On one core a step of the demo model takes 4.5 ms for one decode, 7 for 8 and 22 for 64; a prompt's token adds 0.12 ms.
A request that arrives waits for the step that runs, on P and on D. A group of 64 decodes is therefore stepped in
rotation, and its prompts are cut, whether or not another group waits. It pays for that: 64 sequences in eight steps
take 58 ms instead of 22. On a GPU a step's duration hardly depends on its rows, and there are no portions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.scheduling.group import Group
    from pd_cluster.scheduling.sequence import Sequence

MOST_ROWS = 8  # decodes of a shared group in one step
MOST_PROMPT_TOKENS = 32  # of its prompts in one step
LEAST_PRICE = 4  # prompt tokens that a chunk counts as at least, because of its row of logits


@dataclass(slots=True)
class Portions:
    """The rows and prompt tokens that one step has left for each shared group.

    A group of one sequence is not limited.
    """

    _rows: dict[Group[Sequence], int] = field(default_factory=dict)  # left; a group that is absent has all of them
    _tokens: dict[Group[Sequence], int] = field(default_factory=dict)

    def has_row(self, seq: Sequence) -> bool:
        """Whether the sequence may decode in this step."""
        group = seq.request.group
        return not group.is_shared or self._rows.get(group, MOST_ROWS) > 0

    def take_row(self, seq: Sequence) -> None:
        group = seq.request.group
        if group.is_shared:
            self._rows[group] = self._rows.get(group, MOST_ROWS) - 1

    def prompt_tokens(self, seq: Sequence) -> int | None:
        """How many tokens of the sequence's prompt this step may compute. None: any number."""
        group = seq.request.group
        return max(0, self._tokens.get(group, MOST_PROMPT_TOKENS)) if group.is_shared else None

    def take_prompt_tokens(self, seq: Sequence, num_tokens: int) -> None:
        group = seq.request.group
        if group.is_shared:
            self._tokens[group] = self._tokens.get(group, MOST_PROMPT_TOKENS) - max(num_tokens, LEAST_PRICE)


def in_rotation(running: Iterable[Sequence]) -> list[Sequence]:
    """Returns `running` with the sequences of each large group reordered: the longest without a step comes first.

    Each large group keeps the places that its sequences have in `running`.
    """
    order = list(running)
    places: dict[Group[Sequence], list[int]] = {}
    for place, seq in enumerate(order):
        if seq.request.group.num_slots > MOST_ROWS:
            places.setdefault(seq.request.group, []).append(place)
    for taken in places.values():
        members = sorted((order[place] for place in taken), key=lambda seq: seq.planned_step)
        for place, seq in zip(taken, members, strict=True):
            order[place] = seq
    return order
