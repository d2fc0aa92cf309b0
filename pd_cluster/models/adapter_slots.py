"""The adapters on the device: a slot holds the matrices of one adapter for all products of the model.

A slot is one run of memory, laid out by the adapter's own rank, so that an adapter comes in one copy of what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.linear_adapters import AdapterStep, LinearAdapters
from pd_kernels.lora import RANK_STEP, AdapterMatrices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pd_cluster.models.linear import Linear
    from pd_cluster.models.linear_part import LinearPart
    from pd_kernels.backends import Kernels


class AdapterSlots(AdapterStep):
    """Memory for adapters beside a model of one rank."""

    def __init__(
        self,
        linears: Mapping[str, Sequence[Linear]],
        parts: Mapping[str, LinearPart],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        """Give each Linear that has some of the `parts` its adapters. `linears`: by kind. Raises StartupError."""
        super().__init__(device)
        self.dtype, self.num_slots, self.max_rank = dtype, num_slots, -(-max_rank // RANK_STEP) * RANK_STEP
        shapes: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}  # by kind and index of the Linear
        for part in parts.values():
            _, bounds = shapes.get((part.kind, part.index), (0, (part.start,)))
            shapes[part.kind, part.index] = len(part.inputs), (*bounds, part.start + len(part.rows))
        # Elements of a slot for each rank
        self.size = sum((len(bounds) - 1) * num_inputs + bounds[-1] for num_inputs, bounds in shapes.values())
        try:
            self.memory = torch.zeros(num_slots, self.size * self.max_rank, dtype=dtype, device=device)
        except RuntimeError as error:
            raise StartupError(f"--lora-slots {num_slots}: no room on {device} for {self}: {error}") from error
        self.ranks, start = torch.zeros(num_slots, dtype=torch.int32, device=device), 0
        self._linears: dict[tuple[str, int], LinearAdapters] = {}
        for place, shape in shapes.items():
            matrices = AdapterMatrices(self.memory, self.ranks, self.max_rank, start, *shape)
            self._linears[place] = LinearAdapters(self, kernels, matrices)
            linears[place[0]][place[1]].take_adapters(self._linears[place])
            start += matrices.size

    def __str__(self) -> str:
        gigabytes = self.num_slots * self.size * self.max_rank * self.dtype.itemsize / 1e9
        return f"{self.num_slots} adapters of rank {self.max_rank}: {gigabytes:.2f} GB"

    def place(self, memory: torch.Tensor, rank: int, part: LinearPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Where A [rank, in] and B [out, rank] of a part are in the memory of one slot with this rank."""
        matrices = self._linears[part.kind, part.index].matrices
        a, b = matrices.of(memory, rank)
        return a[matrices.bounds.index(part.start)], b[part.start : part.start + len(part.rows)]

    def fill(self, slot: int, pieces: Iterable[torch.Tensor]) -> None:
        """Copy an adapter of host memory [rank * size] into a slot. The copy may be under way on return."""
        start, memory = 0, self.memory[slot]
        for piece in pieces:
            memory[start : start + len(piece)].copy_(piece, non_blocking=True)
            start += len(piece)
        self.ranks[slot].fill_(start // self.size)
