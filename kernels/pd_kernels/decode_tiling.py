"""The sizes of decode attention's shares, chosen by the shape of a group of layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape

ROTATES_FROM = 129


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Sizes of the kernel's shares; the defaults of `decode_tiling` were chosen by measurement."""

    tile: int  # tokens
    num_warps: int
    num_stages: int
    programs_per_processor: int
    setup: int = 3  # units of a (sequence, KV head) in addition to its tiles
    least: int = 2  # fewest units of a program
    parts: int = 15  # most parts of a pair, if every multiprocessor still gets a program; merging more costs more time
    # Sequences of a step from which on equal shares rotate in the same launch. Fewer gain 2% of attention at most, and
    # a start would compile as many kernels again as it has powers of two
    rotates_from: int = ROTATES_FROM
    # Programs of a (sequence, KV head) in steps of at most `few_pairs` of them: see `triton_split_decode`; 2, 4, 8 ...
    splits: int = 16
    few_pairs: int = 8

    def splits_pairs(self, num_pairs: int, num_processors: int) -> bool:
        """Whether a step has so few (sequence, KV head) pairs that all their programs run at once."""
        return num_pairs <= self.few_pairs and num_pairs * self.splits <= num_processors


def decode_tiling(shape: AttentionShape) -> DecodeTiling:
    """Tiling for a GPU with 228 KiB of shared memory per multiprocessor."""
    if shape.dtype is torch.float32:
        return DecodeTiling(tile=16, num_warps=4, num_stages=2, programs_per_processor=2)
    tile = 64 if shape.head_dim <= 128 else 32
    # Rotating in the same launch saves 22% of 256 decodes with 4 KV heads (174 to 135 us a layer), and costs 2.6% with
    # 8 (16 layers 4.58 ms, in two launches 4.47). With an fp8 cache and 8 it costs 3% of a step of 192, nothing of 256
    rotates_from = ROTATES_FROM if shape.num_kv_heads <= 4 else sys.maxsize
    if shape.has_fp8_cache:
        # Half the bytes with as many products: instructions are the limit, and small programs hide them better. 256
        # decodes of 1k, a layer of an 8B model on an H200: 138 us, with the tiling below 205, of bfloat16 249
        return DecodeTiling(
            tile, num_warps=2, num_stages=5, programs_per_processor=4, parts=30, rotates_from=rotates_from
        )
    if shape.num_kv_heads <= 4 and shape.head_dim <= 128:
        # Few (sequence, KV head) pairs: small programs share them better. 1 / 32 / 128 / 256 decodes of 1k, layers with
        # 4 KV heads on an H200: 12 / 27 / 70 / 140 us, with the tiling below 16 / 30 / 74 / 139; 32 with 8 KV heads 43
        # for 38
        return DecodeTiling(tile, num_warps=2, num_stages=4, programs_per_processor=4)
    # 5 stages keep two tiles in flight, because a tile's address waits for the block table
    return DecodeTiling(tile, num_warps=4, num_stages=5, programs_per_processor=2, rotates_from=rotates_from)
