"""Values that kernels take and return. Tensors are on the device that computes, unless a comment says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]

FEW_ROWS = (16, 64)  # the most rows of kernels for few rows; experts have both

# a packed batch: the tokens of all sequences in one dimension, decodes first


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Which query rows of a packed batch belong to each sequence, and where the KV of the sequence is.

    Sequences `[0, num_decodes)` have one query token each, so their query rows are `[0, num_decodes)`. The other
    sequences are prefill chunks. The copies of the lengths in host memory let a backend plan without reading the
    device.
    """

    num_decodes: int
    query_starts: torch.Tensor  # int32 [num_seqs + 1]: sequence i has query rows [starts[i], starts[i + 1])
    seq_lens: torch.Tensor  # int32 [num_seqs]: tokens in the cache once the tokens of this step are written
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]; entries outside a sequence's live blocks are undefined
    host_query_lens: Ints  # int64 [num_seqs], in host memory
    host_seq_lens: Ints  # int64 [num_seqs], in host memory

    @property
    def num_seqs(self) -> int:
        return len(self.host_seq_lens)


def leading_ones(lens: Ints) -> int:
    """The number of chunks of one token at the front of `lens` [n]. These chunks attend as decodes."""
    longer = np.flatnonzero(lens > 1)
    return int(longer[0]) if len(longer) else len(lens)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The capacity of a captured step."""

    num_tokens: int
    num_seqs: int  # at most num_tokens
    num_chunks: int  # most sequences that attend as prefill chunks
    has_decodes: bool  # whether sequences may attend as decodes
    is_far: bool = False  # tuned for chunks that follow many keys; correct for all chunks
    has_drafts: bool = False  # for decodes with drafts alone
    has_adapters: bool = False  # for steps of which some rows have adapters

    @property
    def num_rows(self) -> int:
        """Most rows of logits. Beside prompts there are as many as sequences, also if some of these have drafts."""
        return self.num_tokens if self.has_drafts else self.num_seqs

    @property
    def is_plain(self) -> bool:
        """Whether each sequence has one token."""
        return not self.num_chunks and not self.has_drafts


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """The lengths and tables of a captured step, on the device. The host does not know their values at capture.

    S = num_seqs of the StepSize. Sequences are numbered as in PackedSequences. Those after the last real one are empty.
    Steps of decodes alone, with or without drafts, may leave the empty sequence S out.
    """

    decode_lens: torch.Tensor  # int32 [S], [0] without decodes: cached tokens of sequences that attend as decodes
    seq_lens: torch.Tensor  # int32 [S + 1]
    query_starts: torch.Tensor  # int32 [S + 2]
    block_tables: torch.Tensor  # int32 [S + 1, max_blocks]
    tiles: torch.Tensor  # int32 [2, num_tiles]: see ChunkTiles.cut


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Sizes of a prefill kernel's tiles; the defaults of `prefill_tiling` were chosen by measurement."""

    rows: int  # tokens times the group's query heads
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # registers of a thread; None: the compiler decides
    parts: int = 1  # programs that share a tile's keys; 1 under a window
    descriptors: bool = True  # use the tensor memory accelerator where the layout allows it


# how each row of a step chooses its token


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits within which each of R rows draws. A row may have none; rows of temperature 0 ignore theirs."""

    top_k: torch.Tensor  # int64 [R], at least 1; V or more: all
    top_p: torch.Tensor  # float32 [R], above 0; 1 or more: all
    min_p: torch.Tensor  # float32 [R], at most 1; 0: all

    def of(self, rows: torch.Tensor) -> Limits:
        """The limits of `rows` (int64 [P])."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens each of R rows may take. M masks of W = ceil(V / 32) words."""

    masks: torch.Tensor  # int32 [M, W]: bit i of word j allows token 32 j + i; bits from V on are ignored
    mask_of_row: torch.Tensor  # int64 [R], in [-1, M); -1: the row may take every token
    void: torch.Tensor | None = None  # int64, rows of R: they must not be drawn, because their mask is not known


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of R rows of logits chooses its token."""

    temperature: torch.Tensor  # float32 [R]; 0: the first of the greatest logits is chosen, without a draw
    seeds: torch.Tensor  # int64 [R]: any bits
    positions: torch.Tensor  # int64 [R]: number of the sequence's tokens before the token to choose
    limits: Limits | None = None  # None: no row has a limit
    masks: TokenMasks | None = None  # None: no row has a mask

    def of(self, rows: torch.Tensor) -> Draws:
        """The draws of `rows` (int64 [P]), without masks."""
        limits = self.limits and self.limits.of(rows)
        return Draws(self.temperature[rows], self.seeds[rows], self.positions[rows], limits)


# how a token chooses its experts


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's products with a token become the experts of the token and their scores.

    Experts are chosen by their scores plus the router's bias, if it has one. With several groups, only experts of the
    best groups can be chosen (DeepSeek-V3, arXiv 2412.19437, section 2.1: by the sums of the two best of each).
    """

    num_chosen: int  # experts of a token
    normalized: bool  # the scores of the chosen experts are divided by their sum
    is_sigmoid: bool = False  # a score is the sigmoid of the product; else the softmax over all experts
    factor: float = 1.0  # on the scores, at the end
    num_groups: int = 1  # groups of experts with adjacent numbers
    groups_chosen: int = 1
    group_best: int = 2  # a group's rank is the sum of so many of its best (1: DeepSeek-V2)
    biases_products: bool = False  # the router's bias is added to the products instead
    num_shared: int = 0  # experts that every token has besides, the last ones
    shared_gated: bool = False  # the router's last row is the gate of the shared expert; else shared scores are 1

    @property
    def num_scores(self) -> int:
        """Experts of a token with the shared ones, which come last."""
        return self.num_chosen + self.num_shared


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The experts that one rank's weights are of: consecutive ones from `first` on, of a mixture of `num_experts`."""

    first: int
    num_experts: int


Gates: TypeAlias = tuple[float, float] | None  # limit and alpha of BiasedExperts; None: no gates and ups


# norms


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """RMSNorm of T rows before its division: x = rows * weight. Each row must be divided by its root mean square later.

    The product before the norm writes this, and the product after it divides. The sum of squares of a row comes in
    pieces, because no program of the first product has the whole row.
    """

    x: torch.Tensor  # [T, size]
    squares: torch.Tensor  # float32 [pieces, T]: a row's pieces add up to the sum of its squares
    eps: float

    def normed(self) -> torch.Tensor:
        """The rows after the division, [T, size]. It is three launches on a GPU, so products divide instead."""
        mean = self.squares.sum(0)[:, None] / self.x.shape[1]
        return (self.x * (mean + self.eps).rsqrt()).to(self.x.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm weights of a layer's queries and keys.

    [head_dim]: of every head alone (Qwen3). [heads, head_dim]: of a token's heads together, as one row (MiniMax-M2).
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class KeysValues(NamedTuple):
    """One layer's cache: views [num_blocks, num_kv_heads, block_size, head_dim] each, with the rank's heads."""

    keys: torch.Tensor
    values: torch.Tensor


class NewTokens(NamedTuple):
    """What a step has for one layer besides the QKV product of its tokens: see `reference.norm_rope_write`."""

    norms: HeadNorms | None
    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
