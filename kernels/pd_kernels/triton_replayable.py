"""Attention of captured steps with any mix of sequences. Its plan does not depend on lengths: replays read those on the
device.

Decodes are always planned on the device. The tiles of prefill chunks come from the host with the step's other numbers,
as many as a step of this size may need; unused ones belong to the empty padding sequence. A kernel stops at once at a
tile without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd_kernels.checks import check_cache_views, check_query, output
from pd_kernels.hopper_prefill import serves_hopper
from pd_kernels.triton_decode import DecodePlan, decode_attention, decode_tiling, num_processors, plan_decode
from pd_kernels.triton_prefill import (
    PrefillPlan,
    cut_chunks,
    prefill_attention,
    prefill_tiling,
    room_for_parts,
)
from pd_kernels.values import PackedSequences, PrefillTiling

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import Ints, StepOnDevice, StepSize

_FAR_KEYS = 4096  # far steps are tiled for so many
_VOID = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class TritonReplayable:
    """Attention of steps of one size."""

    num_heads: int
    group: int  # query heads per KV head
    num_tiles: int
    tiling: PrefillTiling

    @classmethod
    def of(
        cls, size: StepSize, num_heads: int, key_cache: torch.Tensor, windowed: bool = False
    ) -> TritonReplayable | None:
        """`key_cache`: any layer's, for shape and dtype. None if a KV head's query heads do not fit a tile, or if
        far steps would have the same tiles as near ones."""
        hopper = not windowed and serves_hopper(num_heads, key_cache)  # its kernel supports no window
        near, far = (
            prefill_tiling(
                key_cache.dtype, key_cache.shape[3], size.num_tokens * num_heads, num_keys,
                num_processors(key_cache.device), hopper,
            )
            for num_keys in (0, _FAR_KEYS)
        )  # fmt: skip
        tiling, group = far if size.is_far else near, num_heads // key_cache.shape[1]
        if group > tiling.rows or (size.is_far and far == near):
            return None
        num_tiles = size.num_tokens // (tiling.rows // group) + size.num_chunks
        return cls(num_heads, group, num_tiles, tiling)

    def tiles(self, query_lens: Ints, seq_lens: Ints, num_decodes: int, padding_seq: int) -> Ints:
        """Tiles [2, num_tiles] of the step's chunks, which follow the decodes; the rest belong to `padding_seq`."""
        found = cut_chunks(query_lens, seq_lens, num_decodes, self.tiling.rows // self.group)
        tiles = np.zeros((2, self.num_tiles), np.int64)
        tiles[0, found.shape[1] :] = padding_seq
        tiles[:, : found.shape[1]] = found
        return tiles

    def plan(self, step: StepOnDevice, key_cache: torch.Tensor, window: int = 0) -> ReplayablePlan:
        """A plan for all layers with this window. Raises ValueError for a window in a far size: it has few keys."""
        if window and self.tiling.parts > 1:
            raise ValueError("a window's keys are not shared among programs")
        decode = None
        if len(step.decode_lens):
            decode = plan_decode(step.decode_lens, key_cache, window, decode_tiling(key_cache))
        packed = PackedSequences(0, step.query_starts, step.seq_lens, step.block_tables, _VOID, _VOID)
        room = room_for_parts(self.tiling, self.num_tiles, key_cache)
        return ReplayablePlan(step, packed, window, decode, PrefillPlan(self.tiling, step.tiles, room))


@dataclass(frozen=True, slots=True)
class ReplayablePlan:
    """Attention of one size for all layers with the same window."""

    step: StepOnDevice
    packed: PackedSequences  # the same, with empty host arrays
    window: int
    decode: DecodePlan | None
    prefill: PrefillPlan

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See backends.AttentionPlan. Rows without a sequence keep their values or become 0. Raises ValueError."""
        check_cache_views(key_cache, value_cache)
        check_query(query, key_cache, len(query))
        out = output(out, query.shape, query)
        lens, tables = self.step.decode_lens, self.step.block_tables
        if self.decode is not None:  # first: it zeroes the rows of chunks
            rows = slice(0, len(lens))
            decode_attention(query[rows], key_cache, value_cache, tables, lens, self.decode, out[rows], scale)
        prefill_attention(query, key_cache, value_cache, self.packed, self.prefill, out, scale, self.window)
        return out
