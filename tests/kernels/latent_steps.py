"""Steps of latent attention with known caches, and the definition of their results, one token after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pd_kernels.latent import LatentDims, NewLatents
from pd_kernels.torch_ops import rms_norm, rope
from pd_kernels.values import PackedSequences, leading_ones

DIMS = LatentDims(rank=24, rope=8, nope=12, value=20)
EPS = 1e-6


class Chunk(NamedTuple):
    """The tokens of one sequence in a step."""

    before: int
    size: int


@dataclass(frozen=True)
class LatentStep:
    """A step after its products. What no token wrote is NaN in `cache`, as is the rest of memory."""

    dims: LatentDims
    query: torch.Tensor  # [T, H, nope + rope], not rotated
    keys: torch.Tensor  # [T, width], neither normed nor rotated
    new: NewLatents
    expand: torch.Tensor
    cache: torch.Tensor  # one layer's view
    packed: PackedSequences
    scale: float
    rows: list[torch.Tensor]  # of each sequence, the step's tokens among them: [tokens, width]

    @property
    def rotated(self) -> torch.Tensor:
        """The queries as attention takes them."""
        nope = self.dims.nope
        return torch.cat((self.query[..., :nope], rope(self.query[..., nope:], self.new.cos, self.new.sin)), 2)


def make_step(
    chunks: list[Chunk], *, num_heads: int = 3, dims: LatentDims = DIMS, block_size: int = 16,
    dtype: torch.dtype = torch.float64, num_layers: int = 3, seed: int = 0,
) -> LatentStep:  # fmt: skip
    """A step of `chunks` over layer 1 of a cache with scattered blocks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    counts, ends = np.array([one.size for one in chunks]), np.array([sum(one) for one in chunks])
    num_tokens, per_seq = int(counts.sum()), -(-ends // block_size)
    num_blocks = int(per_seq.sum()) + 2
    cache = torch.full((num_blocks, 1, num_layers, block_size, dims.width), torch.nan, dtype=dtype)[:, 0, 1]
    order = torch.randperm(num_blocks, generator=generator)
    tables = torch.full((len(chunks), int(per_seq.max()) + 1), int(order[-1]), dtype=torch.int32)
    keys, angles = draw(num_tokens, dims.width), draw(num_tokens, dims.rope // 2)
    norm = draw(dims.rank)
    new = [rms_norm(keys[:, : dims.rank].contiguous(), norm, EPS), keys[:, None, dims.rank :]]
    own = torch.cat((new[0], rope(new[1], angles.cos(), angles.sin())[:, 0]), 1)
    rows, slots, used, start = [], [], 0, 0
    for index, chunk in enumerate(chunks):
        blocks = order[used : used + per_seq[index]]
        used += int(per_seq[index])
        tables[index, : len(blocks)] = blocks.int()
        before = draw(chunk.before, dims.width)
        places = torch.arange(ends[index])
        places = blocks[places // block_size] * block_size + places % block_size
        cache[places[: chunk.before] // block_size, places[: chunk.before] % block_size] = before
        slots.append(places[chunk.before :])
        rows.append(torch.cat((before, own[start : start + chunk.size])))
        start += chunk.size
    starts = np.concatenate(([0], np.cumsum(counts)))
    packed = PackedSequences(
        leading_ones(counts), torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), tables,
        counts, ends,
    )  # fmt: skip
    return LatentStep(
        dims, draw(num_tokens, num_heads, dims.nope + dims.rope), keys,
        NewLatents(norm, EPS, angles.cos(), angles.sin(), torch.cat(slots)),
        draw(num_heads, dims.nope + dims.value, dims.rank) / dims.rank**0.5, cache, packed, 0.2, rows,
    )  # fmt: skip


def attended(step: LatentStep) -> torch.Tensor:
    """The definition: [T, H, value] in float64, of expanded keys and values."""
    (rank, _, nope, _), out, start = step.dims, [], 0
    expand, query = step.expand.double(), step.rotated.double()
    for count, rows in zip(step.packed.host_query_lens, (one.double() for one in step.rows), strict=True):
        both = torch.einsum("tr,hdr->thd", rows[:, :rank], expand)
        shared = rows[:, None, rank:].expand(-1, len(expand), -1)
        keys, values = torch.cat((both[..., :nope], shared), 2), both[..., nope:]
        for index in range(int(count)):
            seen = len(rows) - int(count) + index + 1
            scores = torch.einsum("hd,thd->ht", query[start + index], keys[:seen]) * step.scale
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:seen]))
        start += int(count)
    return torch.stack(out)
