"""A packed batch, as attention sees it: tokens of all sequences in one dimension, decodes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Who owns which rows of the batch, and where their KV lies.

    Sequences `[0, num_decodes)` have one query token each, so their query rows are `[0, num_decodes)`; the rest are
    prefill chunks. Host copies let a backend plan without reading the device.
    """

    num_decodes: int
    query_starts: torch.Tensor  # int32 [num_seqs + 1]: sequence i owns query rows [starts[i], starts[i + 1])
    seq_lens: torch.Tensor  # int32 [num_seqs]: tokens in the cache once this step's are written
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]; entries past a sequence's last block are ignored
    host_query_lens: Ints  # int64 [num_seqs]
    host_seq_lens: Ints  # int64 [num_seqs]

    @property
    def num_seqs(self) -> int:
        return len(self.host_seq_lens)


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a captured step has room for."""

    num_tokens: int
    num_seqs: int  # at most as many as tokens
    num_chunks: int  # of the sequences, those that attend as prefill chunks
    has_decodes: bool  # whether sequences may attend as decodes
    is_far: bool = False  # meant for chunks at the end of many keys; right for all


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """A step of a StepSize whose numbers the host does not know: a replay reads those that are there by then.

    S = num_seqs. Sequences are numbered as in PackedSequences; those behind the last real one are empty.
    """

    decode_lens: torch.Tensor  # int32 [S], [0] without decodes: tokens in the cache of those that attend as decodes
    seq_lens: torch.Tensor  # int32 [S + 1]
    query_starts: torch.Tensor  # int32 [S + 2]
    block_tables: torch.Tensor  # int32 [S + 1, max_blocks]
    tiles: torch.Tensor  # int32 [2, num_tiles]: see ReplayableAttention.tiles
