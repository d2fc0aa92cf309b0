"""Hashes blocks before their hashes are needed, in time in which the step loop would sleep. Pure but for its clock.

A prompt is hashed before its step as far as it may be cached (`Sequence.iter_hashes`). The other hashes are needed when
its KV is here: when its step has retired, or its load has ended. Computed only then they delay tokens: 8,192 tokens
take 0.7 ms.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.scheduling.sequence import Sequence

PIECE = 1024  # tokens that are hashed between two looks at the clock: 50 to 80 us


class HashAhead:
    """Sequences in the order in which their hashes will be needed.

    Those that have ended, or were hashed because there was no time before, are dropped when others come: they are not
    kept by an engine that never sleeps.
    """

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._clock = clock
        self._expected: deque[tuple[Sequence, int]] = deque()

    def expect(self, seq: Sequence, num_tokens: int) -> None:
        """Note that the hashes of the whole blocks of the sequence's first `num_tokens` will be needed."""
        self._expected.append((seq, num_tokens))
        self._drop_done()

    def expect_prompts(self, chunks: tuple[SequenceChunk, ...], sequences: Mapping[int, Sequence]) -> None:
        """`expect` what a step computes of prompts. `chunks`: decodes come first. `sequences`: by id."""
        for chunk in reversed(chunks):
            if chunk.num_tokens == 1 or chunk.drafts:
                return
            self.expect(sequences[chunk.seq_id], chunk.start + chunk.num_tokens)

    def run(self, until_s: float = inf) -> bool:
        """Hash until the clock says `until_s`, or nothing is left. Returns whether something is left.

        What is left is hashed when it is needed.
        """
        size, piece = self._block_size, max(PIECE, self._block_size)
        while self._expected and self._clock() < until_s:
            seq, num_tokens = self._expected[0]
            num_tokens = min(num_tokens, len(seq.token_ids), len(seq.block_hashes) * size + piece)
            seq.hash_blocks(num_tokens // size, size)
            self._drop_done()
        return bool(self._expected)

    def _drop_done(self) -> None:
        """Drop the first ones of which nothing more is to be hashed."""
        size = self._block_size
        while self._expected:
            seq, num_tokens = self._expected[0]
            num_left = min(num_tokens, len(seq.token_ids)) - len(seq.block_hashes) * size
            if seq.finish_reason is None and num_left >= size:
                return
            self._expected.popleft()
