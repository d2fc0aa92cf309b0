"""Norms over all heads of a token, some of which each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pd_cluster.models.reduce import Reduce
    from pd_kernels.backends import NormRopeWrite
    from pd_kernels.values import KeysValues, NewTokens


@dataclass(frozen=True, slots=True)
class HeadNormsOverRanks:
    """A NormRopeWrite that norms a token's heads together over all ranks, and leaves the rest to `kernel`.

    One sum over ranks, of two numbers a token, in each layer.
    """

    kernel: NormRopeWrite
    reduce: Reduce
    num_ranks: int

    def __call__(self, heads: torch.Tensor, new: NewTokens, cache: KeysValues) -> torch.Tensor:
        """See NormRopeWrite. The weights of the norms are those of this rank's heads."""
        assert new.norms is not None
        num_keys, norms = cache.keys.shape[1], new.norms
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_keys, num_keys, num_keys], dim=1)
        wide = [part.float() if part.element_size() < 4 else part for part in (query, key)]
        squares = self.reduce.add(torch.stack([part.pow(2).sum((1, 2)) for part in wide], 1))
        # Replicated KV heads are in the sum as often as in the number of its terms
        normed = []
        for index, (part, weight) in enumerate(zip(wide, (norms.query, norms.key), strict=True)):
            mean = squares[:, index, None, None] / (self.num_ranks * part.shape[1] * part.shape[2])
            normed.append(((part * (mean + norms.eps).rsqrt()).to(weight.dtype) * weight).to(heads.dtype))
        return self.kernel(torch.cat((*normed, value), 1), new._replace(norms=None), cache)
