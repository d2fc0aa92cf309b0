"""One step's attention with flashinfer's prefill in Triton's. Importing this needs triton, flashinfer only its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_kernels.flashinfer_prefill import FlashPrefill
from pd_kernels.triton_attention import TritonAttentionPlan, plan_attention
from pd_kernels.triton_decode import num_processors

if TYPE_CHECKING:
    import torch

    from pd_kernels.packed import PackedSequences
    from pd_kernels.prefill_choice import AttentionShape


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Plans a step: decodes and small prefills are Triton's, and what sees a window.

    The kernel has a processor work at one tile of 128 rows of one head at a time; Triton's packs a group's heads
    into a tile, and so finds work for all processors in chunks in which this one does not.
    """

    prefill: FlashPrefill

    @classmethod
    def load(cls, shape: AttentionShape, compiles: bool) -> FlashAttention:
        """See `FlashPrefill.load`."""
        return cls(FlashPrefill.load(shape, compiles))

    def __call__(self, packed: PackedSequences, key_cache: torch.Tensor, window: int = 0) -> TritonAttentionPlan:
        chunks = None
        if (
            not window and packed.num_decodes < packed.num_seqs
        ):  # flashinfer 0.6.13 reads a window's first V tile wrongly
            num_tiles = self.prefill.num_tiles(packed.host_query_lens[packed.num_decodes :])
            if num_tiles >= num_processors(self.prefill.shape.device):
                chunks = self.prefill.plan(packed)
        return plan_attention(packed, key_cache, window, chunks=chunks)
