"""The planning of latent attention, the same for every backend, and what none of them computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd_kernels.chunk_tiles import ChunkTiles
from pd_kernels.latent import MOST_ROWS, LatentChunks, LatentPlan, LatentRows
from pd_kernels.values import PackedSequences

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape
    from pd_kernels.latent import LatentOps
    from pd_kernels.values import StepOnDevice, StepSize


def refusal(shape: AttentionShape) -> str:
    """Why no latent backend serves a group; "": it is a latent one."""
    if shape.latent is None:
        return "attends over latent keys alone"
    what = {"windows": shape.window, "sinks": shape.has_sinks, "float8 cache": shape.has_fp8_cache}
    return next((f"has no {name}" for name, value in what.items() if value), "")


@dataclass(frozen=True, slots=True)
class LatentReplayable:
    """The Replayable of LatentAttention: of steps of decodes alone, with or without drafts."""

    ops: LatentOps
    size: StepSize

    @property
    def tiles(self) -> ChunkTiles:
        """See Replayable: there are no chunks."""
        return ChunkTiles(1, 0)

    def plan(self, step: StepOnDevice) -> LatentPlan:
        """See Replayable."""
        rows = LatentRows(
            self.size.num_tokens, not self.size.has_drafts, step.query_starts, step.seq_lens, step.block_tables
        )
        return LatentPlan(self.ops, rows, None)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The GroupAttention of every latent backend."""

    shape: AttentionShape
    ops: LatentOps

    def plan(self, packed: PackedSequences) -> LatentPlan:
        """See GroupAttention."""
        longer = np.flatnonzero(packed.host_query_lens > MOST_ROWS)
        count = int(longer[0]) if len(longer) else packed.num_seqs
        lens, ends = packed.host_query_lens, packed.host_seq_lens
        num_rows = int(lens[:count].sum())
        rows = chunks = None
        if count:
            rows = LatentRows(
                num_rows, num_rows == count, packed.query_starts[: count + 1], packed.seq_lens[:count],
                packed.block_tables[:count], lens[:count], ends[:count],
            )  # fmt: skip
        if count < packed.num_seqs:
            starts = packed.query_starts[count:] - num_rows
            own = PackedSequences(
                0, starts, packed.seq_lens[count:], packed.block_tables[count:], lens[count:], ends[count:]
            )
            chunks = LatentChunks(own)
        return LatentPlan(self.ops, rows, chunks)

    def captured(self, size: StepSize) -> LatentReplayable | None:
        """See GroupAttention. Steps with prompts are not captured: how they attend depends on their lengths."""
        return LatentReplayable(self.ops, size) if self.ops.captures and not size.num_chunks else None
