"""Times latent attention of a layer: decodes of Moonlight's and of Kimi-K2's heads, with drafts, and prompts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from benchmarks.kernel_time import KernelTime, seconds_of
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.latent import LatentDims, LatentPlan, NewLatents
from pd_kernels.latent_attention import LatentAttention
from pd_kernels.values import PackedSequences

if TYPE_CHECKING:
    from collections.abc import Iterator

MOONLIGHT, GLM, MISTRAL = LatentDims(512, 64, 128, 128), LatentDims(512, 64, 192, 256), LatentDims(256, 64, 64, 128)
BLOCK, LAYERS = 64, 3  # layers: of which no two are in the L2 cache at once where there are many sequences
STEPS = (  # heads, sizes, sequences, cached tokens of each, tokens of each in this step
    *((16, MOONLIGHT, num_seqs, 1024, 1) for num_seqs in (1, 32, 128, 256)), (16, MOONLIGHT, 32, 8192, 1),
    (16, MOONLIGHT, 128, 1024, 4), *((20, GLM, num_seqs, 1024, 1) for num_seqs in (1, 32, 128, 256)),
    (32, MISTRAL, 128, 1024, 1), (64, MOONLIGHT, 32, 1024, 1), (64, MOONLIGHT, 256, 1024, 1),
    (16, MOONLIGHT, 64, 1024, 1024), (20, GLM, 64, 1024, 1024), (16, MOONLIGHT, 1, 8192, 8192),
    (16, MOONLIGHT, 1, 8192, 128), (16, MOONLIGHT, 1, 8192, 512),
)  # fmt: skip


class _Step(NamedTuple):
    attention: LatentAttention
    plan: LatentPlan
    query: torch.Tensor
    own: torch.Tensor
    expand: torch.Tensor
    new: NewLatents
    caches: list[torch.Tensor]

    def absorbed(self, layer: int) -> torch.Tensor:
        """Decode alone: the queries are absorbed already."""
        assert self.plan.rows is not None
        rank = self.expand.shape[2]
        query, turned = self.query[..., :rank], self.query[..., rank:]
        return self.attention.ops.decode(query, turned, self.caches[layer], self.plan.rows, 0.07)

    def whole(self, layer: int) -> torch.Tensor:
        return self.plan.run(self.query, self.own, self.expand, self.caches[layer], 0.07)

    def write(self, layer: int) -> torch.Tensor:
        return self.attention.ops.norm_rope_write(self.query, self.own, self.new, self.caches[layer])


def latent_rows() -> Iterator[KernelTime]:
    """Bytes are those of the cached rows, FLOPs those of absorbed or of expanded attention without the expansion."""
    for num_heads, dims, num_seqs, length, count in STEPS:
        is_decode = count <= 4
        step = _make(num_heads, dims, num_seqs, length, count, is_decode)
        call = step.absorbed if is_decode else step.whole
        width = 2 * dims.rank + dims.rope if is_decode else sum(dims) - dims.rank
        pairs = num_seqs * count * (2 * length - count + 1) / 2
        name = f"latent {num_heads} heads {num_seqs} x {count} of {length}"
        size = num_seqs * length * dims.width * 2.0
        seconds = seconds_of([partial(call, layer) for layer in range(LAYERS)])
        yield KernelTime(name, seconds, size, 2.0 * num_heads * pairs * width)
    for num_seqs in (1, 128):
        step = _make(16, MOONLIGHT, num_seqs, 1024, 1, False)
        seconds = seconds_of([partial(step.write, layer) for layer in range(LAYERS)])
        yield KernelTime(f"latent rows {num_seqs}", seconds, num_seqs * (16 * 64 * 2 + 3 * MOONLIGHT.width) * 2.0, 0.0)


def _make(num_heads: int, dims: LatentDims, num_seqs: int, length: int, count: int, is_absorbed: bool) -> _Step:
    """Sequences of scattered blocks. `is_absorbed`: a query has the numbers of a row of the cache."""
    cuda, short, per_seq, tokens = torch.device("cuda"), torch.bfloat16, -(-length // BLOCK), num_seqs * count
    cache = torch.randn(num_seqs * per_seq, 1, LAYERS, BLOCK, dims.width, device=cuda, dtype=short)
    tables = torch.randperm(len(cache), device=cuda).to(torch.int32).view(num_seqs, per_seq)
    lens, counts = np.full(num_seqs, length), np.full(num_seqs, count)
    starts = torch.arange(num_seqs + 1, device=cuda, dtype=torch.int32) * count
    ends = torch.full((num_seqs,), length, device=cuda, dtype=torch.int32)
    packed = PackedSequences(num_seqs if count == 1 else 0, starts, ends, tables, counts, lens)
    shape = AttentionShape(num_heads, 1, dims.width, BLOCK, LAYERS, short, latent=dims)
    attention = choose_attention(shape, cuda).backend.attention(shape, cuda)
    assert isinstance(attention, LatentAttention)
    width = dims.width if is_absorbed else dims.nope + dims.rope
    query = torch.randn(tokens, num_heads, width, device=cuda, dtype=short)
    expand = torch.randn(num_heads, dims.nope + dims.value, dims.rank, device=cuda, dtype=short) / dims.rank**0.5
    angles = torch.randn(2, tokens, dims.rope // 2, device=cuda, dtype=short)
    slots = (tables.long()[:, -1] * BLOCK + BLOCK - 1).repeat_interleave(count)
    new = NewLatents(torch.ones(dims.rank, device=cuda, dtype=short), 1e-6, angles[0], angles[1], slots)
    own = torch.randn(tokens, dims.width, device=cuda, dtype=short)
    caches = [cache[:, 0, layer] for layer in range(LAYERS)]
    return _Step(attention, attention.plan(packed), query, own, expand, new, caches)
