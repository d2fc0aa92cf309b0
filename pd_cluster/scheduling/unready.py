"""Sequences that may not be drawn yet, because the worker still makes what their next token needs.

A constrained sequence becomes one when its request begins, and each time it has sat out a draw. Before a plan, the
engine asks the worker which of them are ready. No step reaches the last known token of the others: their logits would
be computed for nothing. Their prompts are computed up to that token, while the grammar is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.sequence import Sequence

# From the first step that leaves a sequence out to the end of its request. Within the bounds of a grammar a mask takes
# up to 0.1 s and a compilation 0.2 s, and those of other sequences may be in front
UNREADY_DEADLINE_S = 5.0


class Unready:
    """The unready sequences, and since when each of them is left out of steps.

    Invariant: they have not ended. A sequence that becomes ready is in the next step, like any other.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._since_s: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._sequences

    @property
    def wanted(self) -> dict[int, SamplingParams]:
        """The parameters of the sequences, by id."""
        return {seq_id: seq.request.sampling for seq_id, seq in self._sequences.items()}

    def add(self, seq: Sequence) -> None:
        self._sequences[seq.seq_id] = seq

    def discard(self, seq_ids: Iterable[int]) -> None:
        """Remove sequences that are ready, or have ended. Unknown ids are ignored."""
        for seq_id in seq_ids:
            self._sequences.pop(seq_id, None)
            self._since_s.pop(seq_id, None)

    def note_ready(self, seq_ids: Iterable[int], now_s: float) -> list[int]:
        """Let the next step draw these sequences. -> the unready ones that have missed their deadline: end them."""
        self.discard(seq_ids)
        return [seq_id for seq_id, since_s in self._since_s.items() if now_s - since_s >= UNREADY_DEADLINE_S]

    def holds(self, seq: Sequence, now_s: float) -> bool:
        """Whether a step must leave out this sequence, which it would compute otherwise. Notes since when."""
        is_held = seq in self and seq.num_remaining_tokens == 1
        if is_held:
            self._since_s.setdefault(seq.seq_id, now_s)
        return is_held
