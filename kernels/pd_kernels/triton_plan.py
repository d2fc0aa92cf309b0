"""Attention of a step in Triton: one launch for decodes, another for prefill chunks, in plain and in captured steps.

Captured steps of decodes with drafts have a launch of their own, and in plain steps these attend as chunks.

The device plans decodes from lengths in its memory. The host cuts chunks into tiles. A captured step gets its tiles
with its other inputs, as many as a step of its size may need. Unused tiles belong to an empty padding sequence, and the
kernel ends at once for a tile without tokens. So a replay may have other lengths than the capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from pd_kernels.checks import check_cache, check_heads, check_query, output
from pd_kernels.chunk_tiles import ChunkTiles
from pd_kernels.decode_tiling import DecodeTiling, decode_tiling
from pd_kernels.launch_sizes import num_processors
from pd_kernels.triton_decode import DecodePlan, decode_attention, plan_decode
from pd_kernels.triton_draft_attention import DraftAttentionPlan, draft_attention, plan_draft_attention
from pd_kernels.triton_prefill import (
    LargeTiles,
    PrefillPlan,
    plan_prefill,
    prefill_attention,
    prefill_tiling,
    room_for_parts,
    unshared_if_many,
)
from pd_kernels.triton_split_decode import split_attention
from pd_kernels.values import PackedSequences, PrefillTiling

if TYPE_CHECKING:
    import torch

    from pd_kernels.attention import AttentionShape
    from pd_kernels.values import KeysValues, NewTokens, StepOnDevice, StepSize

_FAR_KEYS = 4096  # keys of a sequence for which far steps are tiled
_VOID = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """The GroupAttention of TritonBackend and HopperBackend. A measurement may replace the tilings."""

    shape: AttentionShape
    device: torch.device
    decode: DecodeTiling
    large_tiles: LargeTiles | None  # the kernel for large tiles, if it is not Triton's
    prefill: PrefillTiling | None = None  # None: chosen for each step

    @classmethod
    def of(cls, shape: AttentionShape, device: torch.device, large_tiles: LargeTiles | None = None) -> Self:
        """A TritonAttention with the tilings for a GPU with 228 KiB of shared memory per multiprocessor."""
        return cls(shape, device, decode_tiling(shape), large_tiles)

    def plan(self, packed: PackedSequences) -> TritonAttentionPlan:
        """See GroupAttention."""
        count, num_tokens = packed.num_decodes, int(packed.host_query_lens.sum())
        decode_lens, prefill = packed.seq_lens[:count], None
        if count < packed.num_seqs:
            prefill = self._plan_chunks(packed, num_tokens - count)
        return TritonAttentionPlan(num_tokens, packed, decode_lens, self.shape.window, self._plan(decode_lens), prefill)

    def captured(self, size: StepSize) -> TritonReplayable | None:
        """See GroupAttention."""
        if not size.num_chunks:
            return TritonReplayable(self, size, ChunkTiles(1, 0), None)
        num_rows, far_keys = size.num_tokens * self.shape.num_heads, 0 if self.shape.window else _FAR_KEYS
        near, far = (self._tiling(num_rows, num_keys) for num_keys in (0, far_keys))
        if size.is_far and far == near:
            return None
        tiling = far if size.is_far else near
        num_tokens = tiling.rows // self.shape.heads_per_kv_head
        return TritonReplayable(
            self, size, ChunkTiles(num_tokens, size.num_tokens // num_tokens + size.num_chunks), tiling
        )

    def plan_captured(self, step: StepOnDevice, size: StepSize, tiling: PrefillTiling | None) -> TritonAttentionPlan:
        """A plan that does not depend on lengths. `tiling`: how chunks are tiled; None: the step has no chunks."""
        num_tokens, window = size.num_tokens, self.shape.window
        packed = PackedSequences(0, step.query_starts, step.seq_lens, step.block_tables, _VOID, _VOID)
        if size.has_drafts:
            drafts = plan_draft_attention(self.shape, self.decode, step.seq_lens, step.query_starts, num_tokens)
            return TritonAttentionPlan(num_tokens, packed, step.decode_lens, window, None, None, drafts)
        prefill = None
        if tiling is not None:
            room = room_for_parts(self.shape, tiling, step.tiles.shape[1], self.device)
            prefill = PrefillPlan(tiling, step.tiles, room, self.large_tiles)
        decode = self._plan(step.decode_lens)
        return TritonAttentionPlan(num_tokens, packed, step.decode_lens, window, decode, prefill)

    def _plan(self, decode_lens: torch.Tensor) -> DecodePlan | None:
        if not len(decode_lens):
            return None
        return plan_decode(decode_lens, self.shape.num_kv_heads, self.shape.window, self.decode)

    def _plan_chunks(self, packed: PackedSequences, num_tokens: int) -> PrefillPlan:
        """Plan the step's chunks, which have `num_tokens` tokens."""
        shape, tiling = self.shape, self.prefill
        if tiling is None:
            num_keys = 0 if shape.window else int(packed.host_seq_lens[packed.num_decodes :].max())
            tiling = unshared_if_many(
                self._tiling(num_tokens * shape.num_heads, num_keys), packed, shape, num_processors(self.device)
            )
        return plan_prefill(packed, shape, tiling, self.device, self.large_tiles)

    def _tiling(self, num_rows: int, num_keys: int) -> PrefillTiling:
        shape, has_large = self.shape, self.large_tiles is not None
        return prefill_tiling(shape.dtype, shape.head_dim, num_rows, num_keys, num_processors(self.device), has_large)


@dataclass(frozen=True, slots=True)
class TritonReplayable:
    """The Replayable of TritonAttention."""

    attention: TritonAttention
    size: StepSize
    tiles: ChunkTiles
    tiling: PrefillTiling | None  # None without chunks

    def plan(self, step: StepOnDevice) -> TritonAttentionPlan:
        """See Replayable. Output rows without a sequence keep their values or become 0."""
        return self.attention.plan_captured(step, self.size, self.tiling)


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
    """The AttentionPlan of TritonAttention."""

    num_tokens: int
    packed: PackedSequences
    decode_lens: torch.Tensor  # int32 [n]: lengths of the first n sequences, which attend as decodes
    window: int
    decode: DecodePlan | None  # None without decodes
    prefill: PrefillPlan | None  # None without chunks
    drafts: DraftAttentionPlan | None = None  # of a captured step of decodes with drafts, which has no other plan

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan."""
        check_cache(cache)
        check_query(query, cache.keys, self.num_tokens)
        if query.stride(1) != query.shape[2]:
            raise ValueError(f"a token's query heads must be contiguous, not of stride {query.stride(1)}")
        out = output(out, query.shape, query)
        packed, lens = self.packed, self.decode_lens
        if self.decode is not None:  # first: in captured steps it zeroes the rows of chunks
            rows = slice(0, len(lens))
            decode_attention(query[rows], cache, packed.block_tables, lens, self.decode, out[rows], scale, sinks=sinks)
        if self.prefill is not None:
            prefill_attention(query, cache, packed, self.prefill, out, scale, self.window, sinks)
        if self.drafts is not None:
            draft_attention(query, cache, packed.block_tables, self.drafts, out, scale, sinks)
        return out

    @property
    def may_rotate(self) -> bool:
        """See AttentionPlan. For decodes alone, either few or many."""
        plan = self.decode
        if plan is None or self.prefill is not None:
            return False
        return plan.split_arrived is not None or len(self.decode_lens) >= plan.tiling.rotates_from

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """See AttentionPlan. For heads that rotate, with no norms over several heads."""
        lens, plan = self.decode_lens, self.decode
        if plan is None or not self.may_rotate:
            return None
        if not new.cos.shape[1] or (new.norms is not None and new.norms.query.dim() > 1):
            return None
        check_cache(cache)
        check_heads(heads, new, cache)
        if len(heads) != len(lens):
            raise ValueError(f"heads of {len(heads)} tokens in a step of {len(lens)}")
        _, num_kv_heads, _, size = cache.keys.shape
        out = heads.new_empty(len(heads), heads.shape[1] - 2 * num_kv_heads, size)
        tables = self.packed.block_tables
        if plan.split_arrived is not None:
            split_attention(
                heads, new, cache, tables, lens, plan.split_arrived, out, scale, self.window, plan.tiling, sinks
            )
        else:
            decode_attention(heads, cache, tables, lens, plan, out, scale, new, sinks)
        return out
