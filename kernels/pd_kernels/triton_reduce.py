# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Sums over the ranks of a host, one launch each: alone, or with the residual's addition and the RMSNorm after it.

A block writes its part of the partial sum to every peer's buffer, then a flag, then waits for the flags of the peers'
blocks of the same index, and adds the parts in the order of ranks. So all ranks have the same bits.

- A block writes before it waits, and waits for blocks of its own index only. GPUs start blocks in the order of their
  index, so a grid larger than the GPU makes progress.
- A block publishes after `wait_for_others`. So a flag says that all earlier launches of that rank have ended.
- Every block has places of its own, which it uses in turn: two are enough. A block that uses a place again has seen
  the peers' flags of the turn between, and these say that the peers have read the place.
- Flags count turns modulo 4. A peer is at most one turn ahead, so "not the flag of the turn before" means arrived.

Rounding follows `reference.add_rms_norm` of parts: the sum is rounded, then added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.values import HalfNormed

MOST_RANKS = 8
_PIECE = 1024  # columns of a block, where blocks need not have whole rows
_SUM, _NORM, _HALF_NORM = range(3)
_FLAGS = tl.constexpr(MOST_RANKS)  # flags of a block: 32 bytes, so that blocks do not share what memory moves at once


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """What ranks of one host pass each other partial sums by. Use it on one stream at a time.

    All ranks must launch the same functions in the same order, with tensors of the same shapes.
    """

    rank: int
    addresses: torch.Tensor  # int64 [ranks], on the device: the ranks' buffers as this rank's kernels see them
    turns: torch.Tensor  # int32 [blocks], zeros: the turn of each block, modulo 4
    width: int  # columns of all tensors
    dtype: torch.dtype
    memory: object = None  # keeps the buffers mapped

    @staticmethod
    def num_bytes(num_ranks: int, num_blocks: int, width: int, dtype: torch.dtype) -> int:
        """The size of a rank's buffer. It must be aligned to 16 bytes and zero before any rank uses it."""
        return num_blocks * (MOST_RANKS * 4 + 2 * num_ranks * _slot_size(width) * dtype.itemsize)

    @property
    def num_ranks(self) -> int:
        return len(self.addresses)

    @property
    def num_blocks(self) -> int:
        """Also the most rows of a sum."""
        return len(self.turns)

    def takes(self, partial: torch.Tensor) -> bool:
        """Whether the functions of this file can add the ranks' `partial`s."""
        fits = partial.dim() == 2 and partial.shape[1] == self.width and partial.shape[0] <= self.num_blocks
        return fits and partial.dtype == self.dtype and partial.is_contiguous()


def _slot_size(width: int) -> int:
    """Elements of a block's place: a row, up to a multiple of 16 bytes."""
    return -(-width // 8) * 8


@triton.jit
def _slot(partial, addresses, rank, source, turn, RANKS: tl.constexpr, BLOCKS: tl.constexpr, SLOT: tl.constexpr):
    """Where in `rank`'s buffer the part of `source` belongs in this turn."""
    buffer = (tl.load(addresses + rank) + BLOCKS * _FLAGS * 4).to(partial.dtype)
    place = ((turn % 2) * RANKS + source) * BLOCKS + tl.program_id(0)
    return tl.multiple_of(buffer + place.to(tl.int64) * SLOT, 16)


@triton.jit
def _flag(addresses, rank, source):
    """Where in `rank`'s buffer `source` says that its part is there."""
    flags = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    return flags + tl.program_id(0) * _FLAGS + source


@triton.jit
def _exchange(
    own, partial, addresses, turns, column, inside,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """The float32 sum over ranks of the block's part, of which `own` is this rank's."""
    turn = tl.load(turns + tl.program_id(0))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_slot(partial, addresses, peer, RANK, turn, RANKS, BLOCKS, SLOT) + column, own, mask=inside)
    tl.debug_barrier()  # all threads have written before a flag is set
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.atomic_xchg(_flag(addresses, peer, RANK), (turn + 1) % 4, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = _flag(addresses, RANK, peer)
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == turn:
                pass
    tl.debug_barrier()  # no thread reads before all flags are there
    total = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += own.to(tl.float32)
        else:
            slot = _slot(partial, addresses, RANK, source, turn, RANKS, BLOCKS, SLOT)
            total += tl.load(slot + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(turns + tl.program_id(0), (turn + 1) % 4)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _reduce_kernel(
    partial, residual, weight, squares, addresses, turns, num_rows, residual_stride, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, MODE: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCKS: tl.constexpr, SLOT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The result overwrites `partial`. MODE 0 uses neither `residual` nor `weight`; only MODE 2 uses `squares`."""
    others_may_start(EARLY)
    row, piece = (tl.program_id(0) // PIECES).to(tl.int64), tl.program_id(0) % PIECES
    place = tl.arange(0, COLUMNS)
    column = piece * COLUMNS + place
    inside = column < WIDTH
    residual_at, gain, old = residual + row * residual_stride + column, 0.0, 0.0
    if MODE != 0:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_others(EARLY)
    own = tl.load(partial + row * WIDTH + column, mask=inside, other=0.0)
    if MODE != 0:
        old = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    dtype = partial.dtype.element_ty
    result = _exchange(own, partial, addresses, turns, place, inside, RANK, RANKS, BLOCKS, SLOT).to(dtype)
    if MODE != 0:
        total = (result.to(tl.float32) + old).to(dtype)
        tl.store(residual_at, total, mask=inside)
        value = total.to(tl.float32)
        sum_of_squares = tl.sum(value * value, 0)
        if MODE == 1:
            normed = value * tl.rsqrt(sum_of_squares / WIDTH + eps)
            result = (normed.to(weight.dtype.element_ty).to(tl.float32) * gain).to(dtype)
        else:
            tl.store(squares + piece * num_rows + row, sum_of_squares)
            result = (value * gain).to(dtype)
    tl.store(partial + row * WIDTH + column, result, mask=inside)


def reduce_sum(peers: PeerBuffers, partial: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of `partial` [T, width], which it overwrites. Raises ValueError unless `peers` takes it."""
    _launch(peers, partial, partial, partial, partial, 0.0, _SUM)
    return partial


def reduce_add_norm(
    peers: PeerBuffers, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add the ranks' sum of `partial` [T, width] to `residual`, in place. -> the RMSNorm of the result.

    The norm overwrites `partial`. Raises ValueError unless `peers` takes it.
    """
    _launch(peers, partial, residual, weight, partial, eps, _NORM)
    return partial


def reduce_add_half_norm(
    peers: PeerBuffers, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> HalfNormed:
    """`reduce_add_norm` that leaves the division to the next product. Then several blocks share a row."""
    pieces = _num_pieces(peers, len(partial))
    squares = torch.empty((pieces, len(partial)), dtype=torch.float32, device=partial.device)
    _launch(peers, partial, residual, weight, squares, eps, _HALF_NORM)
    return HalfNormed(partial, squares, eps)


def _num_pieces(peers: PeerBuffers, num_rows: int) -> int:
    pieces = cdiv(peers.width, _PIECE)
    return pieces if pieces * num_rows <= peers.num_blocks else 1


def _launch(
    peers: PeerBuffers,
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    mode: int,
) -> None:
    """The result overwrites `partial`."""
    num_rows = len(partial)
    if not peers.takes(partial) or residual.shape != partial.shape or residual.stride(-1) != 1:
        raise ValueError(f"{tuple(partial.shape)} {partial.dtype} does not fit the buffers of the ranks")
    if residual.dtype != partial.dtype:
        raise ValueError(f"the partial sum is {partial.dtype}, the residual {residual.dtype}")
    if not num_rows:
        return
    pieces = 1 if mode == _NORM else _num_pieces(peers, num_rows)
    columns = min(next_power_of_2(peers.width), _PIECE) if pieces > 1 else next_power_of_2(peers.width)
    early = launches_early(partial.device)
    _reduce_kernel[(num_rows * pieces,)](
        partial, residual, weight, squares, peers.addresses, peers.turns, num_rows, residual.stride(0), eps,
        peers.width, columns, pieces, mode, peers.rank, peers.num_ranks, peers.num_blocks, _slot_size(peers.width),
        early, num_warps=min(max(columns // 512, 1), 16), **early_options(early),
    )  # fmt: skip
