"""Attention of a group of layers: what a backend is asked, and what it makes for a group and for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pd_kernels.chunk_tiles import ChunkTiles
    from pd_kernels.values import PackedSequences, StepOnDevice, StepSize


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the layers of one KV group have in common.

    Their cache is [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim] of `dtype`, as the queries are. A
    backend that does not compute what a field asks for must refuse it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    dtype: torch.dtype
    window: int = 0  # tokens; 0: full attention

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionPlan(Protocol):
    """The attention of one step, for every layer of a group."""

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` [T, H, D] over one layer's cache views [N, G, B, D] -> [T, H, D]: contiguous `out`, or a new one.

        Raises ValueError for tensors of another shape, dtype or layout.
        """


class Replayable(Protocol):
    """Attention of captured steps of one size, for one group."""

    @property
    def tiles(self) -> ChunkTiles:
        """How the host cuts the chunks of such a step."""

    def plan(self, step: StepOnDevice) -> AttentionPlan:
        """A plan that is captured together with its runs. A replay reads the step's numbers on the device."""


class GroupAttention(Protocol):
    """Attention of one group on one device."""

    def plan(self, packed: PackedSequences) -> AttentionPlan:
        """Plan a step. Does not wait for the device."""

    def captured(self, size: StepSize) -> Replayable | None:
        """Attention of captured steps of `size`. None: it cannot be captured, or a near size is as fast as this one."""


class AttentionBackend(Protocol):
    """An implementation of attention."""

    @property
    def name(self) -> str:
        """For messages and for the setting that demands a backend."""

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """Why it cannot serve a group, in a few words that follow its name; "" if it can. May compile a kernel."""

    def attention(self, shape: AttentionShape, device: torch.device) -> GroupAttention:
        """Attention of a group that it can serve."""
