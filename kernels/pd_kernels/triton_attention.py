"""One step's attention in Triton: decodes in one launch, prefill chunks in another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_kernels.checks import check_cache_views, check_query, output
from pd_kernels.hopper_prefill import serves_hopper
from pd_kernels.triton_decode import (
    DecodePlan,
    DecodeTiling,
    decode_attention,
    decode_tiling,
    num_processors,
    plan_decode,
)
from pd_kernels.triton_prefill import (
    PrefillPlan,
    plan_prefill,
    prefill_attention,
    prefill_tiling,
    unshared_if_many,
)

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import PackedSequences, PrefillTiling


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
    """One step's attention for every layer with the same window.

    A plan without chunks does not depend on lengths: when a CUDA graph captures plan and run, a replay reads the
    lengths and tables that `packed`'s tensors hold then. Its host arrays are ignored there.
    """

    packed: PackedSequences
    num_tokens: int
    window: int
    decode: DecodePlan | None  # None without decodes
    prefill: PrefillTiling | None  # None: the default
    prefills: dict[int, PrefillPlan] = field(default_factory=dict)  # by query heads per KV head, made on first use

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See backends.AttentionPlan. Raises ValueError."""
        check_cache_views(key_cache, value_cache)
        check_query(query, key_cache, self.num_tokens)
        if query.stride(1) != query.shape[2]:
            raise ValueError(f"a token's query heads must be contiguous, not of stride {query.stride(1)}")
        out = output(out, query.shape, query)
        packed = self.packed
        if self.decode is not None:
            rows = slice(0, packed.num_decodes)
            decode_attention(
                query[rows], key_cache, value_cache, packed.block_tables, packed.seq_lens, self.decode, out[rows], scale
            )
        if packed.num_decodes < packed.num_seqs:
            group = query.shape[1] // key_cache.shape[1]
            if group not in self.prefills:
                num_rows = (self.num_tokens - packed.num_decodes) * query.shape[1]
                num_keys = 0 if self.window else int(packed.host_seq_lens[packed.num_decodes :].max())
                processors = num_processors(query.device)
                hopper = not self.window and serves_hopper(query.shape[1], key_cache)
                tiling = self.prefill or unshared_if_many(
                    prefill_tiling(query.dtype, query.shape[2], num_rows, num_keys, processors, hopper),
                    packed, query.shape[1], key_cache.shape[1], processors,
                )  # fmt: skip
                self.prefills[group] = plan_prefill(packed, query.shape[1], key_cache, tiling)
            prefill_attention(query, key_cache, value_cache, packed, self.prefills[group], out, scale, self.window)
        return out


def plan_attention(
    packed: PackedSequences,
    key_cache: torch.Tensor,
    window: int = 0,
    decode: DecodeTiling | None = None,
    prefill: PrefillTiling | None = None,
) -> TritonAttentionPlan:
    """`key_cache`: any layer's view, for shape and dtype. The tilings are for measurements."""
    count = packed.num_decodes
    plan = None
    if count:
        plan = plan_decode(packed.seq_lens[:count], key_cache, window, decode or decode_tiling(key_cache))
    return TritonAttentionPlan(packed, int(packed.host_query_lens.sum()), window, plan, prefill)
