"""Where the states of each layer lie in the blocks of their KV group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_kernels.state import StateCache

if TYPE_CHECKING:
    import torch

    from pd_cluster.models.spec import StateSpec


def state_caches(spec: StateSpec, blocks: torch.Tensor, dtype: torch.dtype) -> dict[int, StateCache]:
    """The views of each layer into `blocks`, float32 [slots, value heads of a rank, head_floats].

    A value head has its recurrent states [layers, key_dim, value_dim]. After them it has what the convolutions of its
    share of the layers have seen of its key head, in `dtype` [head_layers, channels, width - 1]: the first value head
    of a key head has the first `head_layers` layers, and so on. So a run of key heads is a run of bytes.
    """
    size, taps = spec.key_dim * spec.value_dim, spec.width - 1
    num_slots, num_heads = blocks.shape[:2]
    inputs = blocks[:, :, len(spec.layers) * size :].view(dtype)
    caches = {}
    for place, layer in enumerate(spec.layers):
        head, own = divmod(place, spec.head_layers)
        first = own * spec.channels * taps
        conv = inputs[:, head :: spec.ratio, first : first + spec.channels * taps]
        recurrent = blocks[:, :, place * size : (place + 1) * size]
        caches[layer] = StateCache(
            conv.view(num_slots, -1, spec.channels, taps),
            recurrent.view(num_slots, num_heads, spec.key_dim, spec.value_dim),
        )
    return caches
