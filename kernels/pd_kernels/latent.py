"""The interface of latent attention (MLA, arXiv 2405.04434), and its plan of a step.

A token's keys and values of all heads are one *row* of the cache: `rank` numbers of a latent, which is normed, then
`rope` numbers of a key, which are rotated. A head expands a latent to its key and value by a matrix. Attention expands
rows, or is *absorbed*: the matrix of keys multiplies the query instead, that of values the result, and a row serves all
heads as their key, its first `rank` numbers as their value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from pd_kernels.values import Ints, PackedSequences

MOST_ROWS = 16  # tokens of a chunk that attends as rows of its sequence: decodes with drafts, and ends of prompts
ABSORBED_QUERIES = 170  # tokens of a chunk from which expanding the prefix takes fewer FLOPs (512 + 64, 128, 128)
PREFIX_PIECE = 4096  # tokens of a prefix that are expanded at a time


class LatentDims(NamedTuple):
    """The sizes of a head."""

    rank: int  # of the latent
    rope: int  # rotated numbers of a query, and of the key that all heads share
    nope: int  # other numbers of a query, and of the key that a latent expands to
    value: int

    @property
    def width(self) -> int:
        """Numbers of a row of the cache."""
        return self.rank + self.rope


class NewLatents(NamedTuple):
    """What a step has for one layer besides its products; see LatentOps.norm_rope_write."""

    norm: torch.Tensor  # [rank]
    eps: float
    cos: torch.Tensor  # [T, rope / 2], of the dtype of queries; contiguous, as `sin`
    sin: torch.Tensor
    slot_mapping: torch.Tensor  # int64 [T]


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Queries that attend one by one. Sequence i has the rows [starts[i], starts[i + 1]), its last tokens.

    The last row of a sequence sees its `lens[i]` tokens in the cache, each row before it one fewer. In captured steps
    sequences after the last real one have length 0 or no rows; rows after the last sequence's are padding. Results of
    rows that see no token are undefined.
    """

    num_rows: int
    is_plain: bool  # each sequence has one row: row i is of sequence i
    starts: torch.Tensor  # int32 [seqs + 1]
    lens: torch.Tensor  # int32 [seqs]
    block_tables: torch.Tensor  # int32 [seqs, max_blocks]; entries after a sequence's last block are undefined
    host_query_lens: Ints | None = None  # int64 [seqs], in host memory; None in captured steps
    host_seq_lens: Ints | None = None
    plans: list[Any] = field(default_factory=list)  # what a kernel makes once for all layers of a step


@dataclass(frozen=True, slots=True)
class LatentChunks:
    """Chunks of prompts, of more than MOST_ROWS tokens or after such a chunk. They are no part of captured steps."""

    packed: PackedSequences  # of the chunks alone: without decodes, query rows from 0 on
    plans: list[Any] = field(default_factory=list)  # as in LatentRows


class LatentOps(Protocol):
    """The functions of latent attention. `torch_latent` defines the results.

    T tokens, R rows, H heads of this rank. `cache`: one layer's view [num_blocks, block_size, width]; a block is
    contiguous, and the distance of blocks is the first stride. `expand` [H, nope + value, rank]: the heads' matrices of
    keys and of values. Tensors but the cache may have any stride of tokens and heads; the last stride is 1. The dtype
    is that of the cache.
    """

    captures: bool  # whether `norm_rope_write` and `decode` can be captured in CUDA graphs

    def norm_rope_write(
        self, query: torch.Tensor, keys: torch.Tensor, new: NewLatents, cache: torch.Tensor
    ) -> torch.Tensor:
        """Rotate the last `rope` numbers of each head of `query` [T, H, nope + rope], in place, and write rows.

        `keys` [T, width]: latents before their norm, keys before rotation, as the product leaves them. Rotation is of
        halves, as in `reference.rope`. -> the rows, [T, width], contiguous, as they are in the cache at the tokens'
        slots.
        """

    def decode(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, rows: LatentRows, scale: float
    ) -> torch.Tensor:
        """Absorbed attention of `rows`, with `query_latent` [R, H, rank] and `query_rope` [R, H, rope].

        -> [R, H, rank], contiguous: the sums of latents. `scale`: the factor on scores.
        """

    def prefill(
        self,
        query: torch.Tensor,
        own: torch.Tensor,
        expand: torch.Tensor,
        cache: torch.Tensor,
        chunks: LatentChunks,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attention of chunks with `query` [T, H, nope + rope], rotated, into `out` [T, H, value], contiguous.

        `own` [T, width]: the chunks' own rows, which are in the cache, too. Each chunk attends to its own keys,
        expanded, causally, and to all tokens before it: absorbed for fewer than ABSORBED_QUERIES tokens, else expanded
        in pieces of PREFIX_PIECE. The parts are merged by their logarithms of sums.
        """


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The plan of one step, for all layers of a group."""

    ops: LatentOps
    rows: LatentRows | None  # the step's first tokens
    chunks: LatentChunks | None  # the tokens after them

    def run(
        self, query: torch.Tensor, own: torch.Tensor, expand: torch.Tensor, cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend with `query` [T, H, nope + rope], rotated, over one layer's cache. -> [T, H, value], contiguous.

        `own`, `expand`, `cache`: see LatentOps.
        """
        nope = query.shape[2] - (cache.shape[2] - expand.shape[2])
        out = query.new_empty(*query.shape[:2], expand.shape[1] - nope)
        count = self.rows.num_rows if self.rows is not None else 0
        if self.rows is not None:
            latent = query.new_empty(count, query.shape[1], expand.shape[2])
            torch.bmm(query[:count, :, :nope].transpose(0, 1), expand[:, :nope], out=latent.transpose(0, 1))
            sums = self.ops.decode(latent, query[:count, :, nope:], cache, self.rows, scale)
            torch.bmm(sums.transpose(0, 1), expand[:, nope:].transpose(1, 2), out=out[:count].transpose(0, 1))
        if self.chunks is not None:
            self.ops.prefill(query[count:], own[count:], expand, cache, self.chunks, scale, out[count:])
        return out
