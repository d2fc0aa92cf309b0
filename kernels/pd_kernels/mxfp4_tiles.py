"""Experts' weights in MXFP4, in the order in which `gluon_mxfp4_experts` reads them.

A tile has LINES outputs and STEP inputs of one expert: PIECES * SHARES blocks of 2 KiB, each of PIECE outputs and 64
inputs, and a row of 128 bytes with the scales of each block. A thread of four warps has 16 bytes of a block. They hold
those numbers that the matrix unit expects in the registers of the thread, so a number goes from memory to its register
without another thread.

Two words hold 16 numbers as 8 pairs. The bits of a pair are where one rotation puts them into the sign, the exponent
and the mantissa of two bfloat16: then they are the numbers times 2 ** -126. Six pairs are each in one word. The bits of
two pairs are in both words, and are selected into a third one first. So 8 pairs take 16 instructions, and 32 where the
two numbers of a byte are neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pd_kernels.launch_sizes import cdiv
from pd_kernels.packed_room import MXFP4_TILE
from pd_kernels.weight_forms import PackedWeight

LINES, STEP = MXFP4_TILE
PIECES = 3  # of a tile
PIECE = LINES // PIECES  # outputs
SHARES = STEP // 64  # of the inputs of a tile
BLOCKS = PIECES * SHARES
# To the left, of the pairs of the first, the second, and the selected word
ROTATIONS = ((0, 4, 10), (2, 6, 12), (8, 14))
SHIFTS = (2, 4, 6)  # those that no used bit passes the end in
USED = 0x81C081C0  # the bits of two bfloat16 that hold two numbers
KEPT = 0x06030603  # the bits of the selected word that are the first word's
MOST_SCALE = 128  # greatest exponent + 127 for which the factor 2 ** (scale - 1) is a bfloat16
_NUMBERS = 1 << 24  # that are packed at once: one expert's gates and ups of gpt-oss


class Mxfp4Tiles(NamedTuple):
    """A weight [E, out, in]; outputs and inputs after the last one are 0."""

    values: torch.Tensor  # uint8 [E * tiles across * steps * BLOCKS * 16, 128]: blocks, in rows of the accelerator
    scales: torch.Tensor  # int32 [E * tiles across * steps * BLOCKS, 32]: a row a block, exponents + 253


def fits(weight: PackedWeight) -> bool:
    """Whether all scales have a factor. One wait for the device."""
    return bool((weight.scales <= MOST_SCALE).all())


def in_tiles(weight: PackedWeight, *, is_gated: bool) -> Mxfp4Tiles:
    """Put a weight into this order. `is_gated`: 8 gates, then the 8 ups of the same activations, and so on.

    A weight with room is overwritten, from its last expert down: an expert's tiles begin after the blocks of those
    before it. New tensors of a layer's size would fit no freed one, and cost gpt-oss-120b 31 GB.
    """
    num_experts, num_outputs, num_inputs = weight.shape
    room = weight.room or PackedWeight.empty(weight.form, weight.shape, weight.blocks.device, has_room=True).room
    assert room is not None
    at_once = max(1, _NUMBERS // (num_outputs * num_inputs))
    for end in range(num_experts, 0, -at_once):
        part = slice(max(0, end - at_once), end)
        tiles = _some_in_tiles(weight.blocks[part], weight.scales[part], is_gated)
        for own, found in zip(room, tiles, strict=True):
            own.view(num_experts, -1)[part].view(-1).copy_(found.view(torch.uint8).view(-1))
    return Mxfp4Tiles(room[0].view(-1, 128), room[1].view(torch.int32).view(-1, 32))


def in_order(bias: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """A bias [E, out] in the order of the tiles' outputs, float32, with zeros after the last one."""
    lines = _gates_and_ups_in_turn(bias.float()[..., None], is_gated)
    return _padded(lines, cdiv(bias.shape[1], LINES) * LINES, 1)[..., 0].contiguous()


def _some_in_tiles(blocks: torch.Tensor, scales: torch.Tensor, is_gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    experts, outputs, groups = scales.shape
    across, steps = cdiv(outputs, LINES), cdiv(32 * groups, STEP)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(experts, outputs, 32 * groups)
    codes = _padded(_gates_and_ups_in_turn(codes, is_gated), across * LINES, steps * STEP)
    # warps, both rows of a thread, its place in the warp; shares, groups of 32, pairs of a group and their places
    codes = codes.view(experts, across, PIECES, 4, 2, 8, steps, SHARES, 2, 2, 2, 4, 2)
    #                  0        1       2       3  4  5  6      7  8  9  10 11 12
    codes = codes.permute(0, 1, 6, 2, 7, 3, 5, 11, 4, 8, 9, 10, 12).reshape(-1, 8, 2)
    words = _words(codes.int())
    values = words.view(torch.uint8).view(-1, 8, 8, 16)  # rows of a swizzle's pattern, units of 16 bytes
    exponents = _padded(_gates_and_ups_in_turn(scales, is_gated), across * LINES, steps * STEP // 32) + 126
    exponents = exponents.view(experts, across, PIECES, 4, 2, 8, steps, SHARES, 2).permute(0, 1, 6, 2, 7, 3, 5, 4, 8)
    exponents = exponents.reshape(-1, BLOCKS, 8, 16)  # the row after the first eight is the first of a copy of its own
    exponents = torch.cat((_swizzled(exponents[:, :8]), exponents[:, 8:]), 1)
    return _swizzled(values).view(-1, 128), exponents.view(-1, 128).view(torch.int32)


def _gates_and_ups_in_turn(lines: torch.Tensor, is_gated: bool) -> torch.Tensor:
    if not is_gated:
        return lines
    experts, outputs, size = lines.shape
    lines = _padded(lines, cdiv(outputs, 16) * 16, size)
    return lines.view(experts, -1, 8, 2, size).transpose(2, 3).reshape(experts, -1, size)


def _padded(lines: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    return torch.nn.functional.pad(lines, (0, inputs - lines.shape[2], 0, outputs - lines.shape[1]))


def _words(codes: torch.Tensor) -> torch.Tensor:
    """int32 [n, 8 pairs, 2] -> int32 [n, 2]."""
    placed = (codes & 7) << 6 | (codes & 8) << 12
    pairs = (placed[..., 0] | placed[..., 1] << 16).long() & 0xFFFFFFFF
    words, pair = [], 0
    for rotations in ROTATIONS:
        word = torch.zeros_like(pairs[:, 0])
        for rotation in rotations:
            word |= pairs[:, pair] >> rotation | pairs[:, pair] << (32 - rotation)
            pair += 1
        words.append(word)
    first, second, both = words
    return torch.stack((first | both & KEPT, second | both & ~KEPT), -1).int()


def _swizzled(units: torch.Tensor) -> torch.Tensor:
    """So that units of 16 bytes are in their order once the memory accelerator has swizzled rows of 128 bytes."""
    row = torch.arange(8, device=units.device)
    return units[:, row[:, None], row[:, None] ^ row]
