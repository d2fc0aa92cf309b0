"""The interface of attention backends.

An AttentionBackend makes a GroupAttention for a group of layers. A GroupAttention makes an AttentionPlan for a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pd_kernels.chunk_tiles import ChunkTiles
    from pd_kernels.latent import LatentDims, LatentPlan
    from pd_kernels.values import KeysValues, NewTokens, PackedSequences, StepOnDevice, StepSize

NO_LATENT = "has no latent keys"  # why a backend of keys and values does not serve a latent group


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties that all layers of one KV group share.

    The cache of the group is [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]. Each block is contiguous;
    the distance of blocks is the tensor's first stride. Attention reads no block before the first one that the first
    query of a sequence sees: such an entry of the block table is undefined. A backend must refuse a
    group if it does not support the value of one field.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    dtype: torch.dtype  # of queries and results
    window: int = 0  # tokens; 0: full attention
    has_fp8_cache: bool = False  # the cache's dtype is `fp8_cache.FP8` instead of `dtype`
    has_sinks: bool = False  # each head sees one more key, without a value: see AttentionPlan.run
    latent: LatentDims | None = None  # the group is [num_blocks, 1, num_layers, block_size, head_dim]: see `latent.py`

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionPlan(Protocol):
    """A plan for the attention of one step. All layers of a group use it."""

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with `query` [T, H, D] over one layer's cache. Returns [T, H, D].

        `sinks` [H]: each head's score of the key without a value, in a group that has sinks. The result is in `out`,
        which must be contiguous, or in a new tensor. Raises ValueError for tensors of another shape, dtype or layout.
        """

    @property
    def may_rotate(self) -> bool:
        """Whether `run_rotating` may do its work for this step; False: it returns None for all layers."""

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Do the work of `norm_rope_write` with `heads` [T, H + 2G, D], then that of `run`, in one launch.

        None, and nothing is done, if the plan cannot do so, or if two launches are faster. Otherwise as `run`.
        """


class Replayable(Protocol):
    """Attention of one group in captured steps of one size."""

    @property
    def tiles(self) -> ChunkTiles:
        """How the host cuts the chunks of such a step into tiles."""

    def plan(self, step: StepOnDevice) -> AttentionPlan | LatentPlan:
        """Plan a captured step. The graph captures the planning together with the runs of the plan.

        A replay reads the lengths and block tables of its step on the device.
        """


class GroupAttention(Protocol):
    """Attention of one group of layers on one device."""

    def plan(self, packed: PackedSequences) -> AttentionPlan | LatentPlan:
        """Plan the attention of a step. Does not wait for the device. Of a latent group it is a LatentPlan."""

    def captured(self, size: StepSize) -> Replayable | None:
        """Attention of captured steps of `size`.

        None when such steps cannot be captured, or when `size.is_far` and the same size without `is_far` is as fast.
        """


class AttentionBackend(Protocol):
    """An implementation of attention."""

    @property
    def name(self) -> str:
        """The backend's name in messages and in the setting that demands a backend."""

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """Why the backend cannot serve a group, in a few words after its name; "" if it can. May compile a kernel."""

    def attention(self, shape: AttentionShape, device: torch.device) -> GroupAttention:
        """Make the attention of a group for which `why_not` returned ""."""
