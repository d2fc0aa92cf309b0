"""A step's attention by Triton, with flashinfer for large prefills. The import needs triton; the use, flashinfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_kernels.flashinfer_prefill import FlashPrefill
from pd_kernels.triton_attention import TritonAttentionPlan, plan_attention
from pd_kernels.triton_decode import num_processors

if TYPE_CHECKING:
    import torch

    from pd_kernels.prefill_choice import AttentionShape
    from pd_kernels.values import PackedSequences


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Plans a step: Triton computes decodes, small prefills and layers with a window; flashinfer the rest.

    flashinfer's kernel gives a processor one tile of 128 rows of one head, with all its keys. Triton's kernel packs a
    group's heads into a tile and shares a tile's keys, and so occupies all processors with a chunk of any size.
    """

    prefill: FlashPrefill

    @classmethod
    def load(cls, shape: AttentionShape, compiles: bool) -> FlashAttention:
        """See `FlashPrefill.load`."""
        return cls(FlashPrefill.load(shape, compiles))

    def __call__(self, packed: PackedSequences, key_cache: torch.Tensor, window: int = 0) -> TritonAttentionPlan:
        chunks = None
        # Under a window flashinfer 0.6.13 reads the values of tile 0 instead of the first keys' (sparse_mainloop.cuh)
        if not window and packed.num_decodes < packed.num_seqs:
            num_tiles = self.prefill.num_tiles(packed.host_query_lens[packed.num_decodes :])
            if 4 * num_tiles >= 3 * num_processors(self.prefill.shape.device):
                chunks = self.prefill.plan(packed)
        return plan_attention(packed, key_cache, window, chunks=chunks)
