"""How prefill chunks are cut into tiles of tokens, the units of work of prefill kernels. Host arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """The tiles of captured steps of one size. KV groups with equal values share them."""

    num_tokens: int  # tokens of a tile, at least 1
    count: int  # most tiles that a step of this size may need

    def cut(self, query_lens: Ints, seq_lens: Ints, num_decodes: int, padding_seq: int) -> Ints:
        """Cut the chunks of a step of n sequences into tiles: [2, count], for StepOnDevice.tiles.

        `query_lens`, `seq_lens`: [n]. Unused tiles belong to `padding_seq`.
        """
        found = cut_chunks(query_lens, seq_lens, num_decodes, self.num_tokens)
        tiles = np.zeros((2, self.count), np.int64)
        tiles[0, found.shape[1] :] = padding_seq
        tiles[:, : found.shape[1]] = found
        return tiles


def cut_chunks(query_lens: Ints, seq_lens: Ints, num_decodes: int, num_tokens: int) -> Ints:
    """Cut the chunks, which follow the decodes, into tiles of `num_tokens` tokens.

    Returns [2, n]: the sequence of each tile, and the tile's first token in the chunk. Tiles with the most keys come
    first.
    """
    lens = query_lens[num_decodes:]
    counts = -(-lens // num_tokens)
    seqs = np.repeat(np.arange(num_decodes, len(query_lens)), counts)
    firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * num_tokens
    num_keys = (seq_lens - query_lens)[seqs] + firsts
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((seqs[order], firsts[order]))
