# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Copies whole cache blocks: one launch on the device, one DMA per block to and from pinned host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv

_PIECE = 4096  # 8-byte words of a block that one program moves


@triton.jit
def _copy_kernel(source, target, pairs, source_stride, target_stride, num_words, PIECE: tl.constexpr):
    pair = tl.program_id(0)
    word = tl.program_id(1).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    read = source + tl.load(pairs + 2 * pair) * source_stride
    write = target + tl.load(pairs + 2 * pair + 1) * target_stride
    tl.store(write + word, tl.load(read + word, mask=word < num_words), mask=word < num_words)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """See reference.copy_blocks. Does not wait if `pairs` is on the CPU.

    Copies to and from the host are queued: read host memory only after the stream has completed them. Raises ValueError
    unless each block on the device is contiguous and a multiple of 8 bytes.
    """
    if source.device != target.device:
        for read, write in pairs.tolist():
            target[write].copy_(source[read], non_blocking=True)
        return
    if not len(pairs):
        return
    known = pairs.tolist() if pairs.device.type == "cpu" else None
    index = pairs.to(source.device, non_blocking=True).contiguous()
    reads, writes = _words(source), _words(target)
    if source.data_ptr() == target.data_ptr() and (known is None or _chained(known)):
        staged = reads.new_empty((len(pairs), reads.shape[1]))
        rows = torch.arange(len(pairs), device=source.device)
        _launch(reads, staged, torch.stack((index[:, 0], rows), dim=1))
        _launch(staged, writes, torch.stack((rows, index[:, 1]), dim=1))
    else:
        _launch(reads, writes, index)


def _chained(pairs: list[list[int]]) -> bool:
    """Whether a pair reads a block that another pair writes."""
    return not {read for read, _ in pairs}.isdisjoint(write for _, write in pairs)


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """The blocks as int64 words, [num_blocks, words of a block]. Raises ValueError."""
    flat = blocks.flatten(1)
    if flat.stride(1) != 1 or flat.data_ptr() != blocks.data_ptr() or flat.shape[1] * flat.element_size() % 8:
        raise ValueError(f"blocks {tuple(blocks.shape)} of {blocks.dtype} are not contiguous words of 8 bytes")
    return flat.view(torch.int64)


def _launch(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    num_words = source.shape[1]
    grid = (len(pairs), cdiv(num_words, _PIECE))
    _copy_kernel[grid](source, target, pairs, source.stride(0), target.stride(0), num_words, _PIECE, num_warps=8)
