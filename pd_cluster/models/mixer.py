"""The part of a layer that reads other tokens than its own: its interface, and what the cache holds for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from pd_kernels.state import StateCache
from pd_kernels.values import KeysValues

if TYPE_CHECKING:
    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_cluster.models.linear import Rows
    from pd_cluster.models.rope import RopeTable

# The cache of one layer; a tensor: rows of latents, see `pd_kernels.latent`
LayerCache: TypeAlias = KeysValues | StateCache | torch.Tensor


class Mixer(Protocol):
    """Mixes the tokens of a sequence, in one layer."""

    @property
    def group(self) -> int:
        """The layer's KV group: index into the fields of ForwardInputs that are by group."""

    def __call__(
        self, x: torch.Tensor, angles: RopeTable, inputs: ForwardInputs, cache: LayerCache, tail: Tail | None
    ) -> Rows:
        """Write what later tokens read of T tokens into the cache, and mix.

        `x`: [T, n], the layer's first product. `angles`: of the T tokens. -> the input of the layer's second product,
        [T, m]; with `tail`, of its R rows only. It may be quantized for that product.
        """
