"""The decodes of a captured step, each with its drafts, as arrays.

Each token of such a step samples. So the rows of logits are the tokens, and a draw's place is the one after its token:
nothing has to be counted a second time. A step in which something else samples is packed by `InputBatch` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_kernels.values import Ints


_NONE, _NO_TOKENS = np.zeros(0, bool), np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PackedDecodes:
    """N decodes with T tokens: of each the certain one, then its drafts."""

    seq_ids: tuple[int, ...]
    rows: Ints  # [N]: in InputBatch
    starts: Ints  # [N]: positions of the certain tokens
    lens: Ints  # [N]: one, and one for each draft
    row_of_token: Ints  # [T]
    positions: Ints  # [T]
    drafts: Sequence[tuple[int, ...]]  # of each; empty: none has drafts, and N is T
    firsts: Ints  # [N]: places of the certain tokens among all; without drafts of no use
    drafted: npt.NDArray[np.bool_]  # [T]: which tokens are drafts; [0] without drafts
    flat: Ints  # these

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], row_of: Mapping[int, int]) -> PackedDecodes:
        """Those with drafts are last."""
        seq_ids = tuple([chunk.seq_id for chunk in chunks])
        rows = np.array([row_of[one] for one in seq_ids])
        starts = np.array([chunk.start for chunk in chunks])
        if not chunks[-1].drafts:
            return cls(seq_ids, rows, starts, np.ones_like(rows), rows, starts, (), rows, _NONE, _NO_TOKENS)
        drafts = [chunk.drafts for chunk in chunks]
        lens = np.array([len(one) for one in drafts])
        lens += 1
        ends = lens.cumsum()
        firsts = ends - lens
        num_tokens = int(ends[-1])
        drafted = np.ones(num_tokens, bool)
        drafted[firsts] = False
        positions = (starts - firsts).repeat(lens)
        positions += np.arange(num_tokens)
        flat = np.fromiter(chain.from_iterable(drafts), np.int64, num_tokens - len(drafts))
        return cls(seq_ids, rows, starts, lens, rows.repeat(lens), positions, drafts, firsts, drafted, flat)

    def fill_tokens(self, tokens: Ints, known: Ints, num_before: int) -> None:
        """Write the places of T tokens in `InputBatch.token_choices`: `known` [N], and drafts after `num_before`."""
        if not self.drafts:
            tokens[:] = known
        else:
            tokens[self.firsts] = known
            tokens[self.drafted] = self.flat + num_before
