"""The adapters on the device: a slot holds the matrices of one adapter for all products of the model.

A slot is one run of memory, laid out by the adapter's own rank, so that an adapter comes in one copy of what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.linear_adapters import AdapterStep, LinearAdapters
from pd_kernels.lora import FEW, RANK_STEP, AdapterMatrices, AdapterRows, tile_rows

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
        self._parts: dict[tuple[str, int], list[LinearPart]] = {}  # by kind and index of the Linear
        for part in parts.values():
            self._parts.setdefault((part.kind, part.index), []).append(part)
        self.size = sum(  # elements of a slot for each rank
            len(own) * len(own[0].inputs) + sum(len(part.rows) for part in own) for own in self._parts.values()
        )
        try:
            self.memory = torch.zeros(num_slots, self.size * self.max_rank, dtype=dtype, device=device)
        except RuntimeError as error:
            raise StartupError(f"--lora-slots {num_slots}: no room on {device} for {self}: {error}") from error
        self.ranks, start = torch.zeros(num_slots, dtype=torch.int32, device=device), 0
        self._linears: dict[tuple[str, int], LinearAdapters] = {}
        for place, own in self._parts.items():
            bounds = (*(part.start for part in own), own[-1].start + len(own[-1].rows))
            matrices = AdapterMatrices(self.memory, self.ranks, self.max_rank, start, len(own[0].inputs), bounds)
            self._linears[place] = LinearAdapters(self, kernels, matrices)
            linears[place[0]][place[1]].take_adapters(self._linears[place])
            start += matrices.size

    def __str__(self) -> str:
        gigabytes = self.num_slots * self.size * self.max_rank * self.dtype.itemsize / 1e9
        return f"{self.num_slots} adapters of rank {self.max_rank}: {gigabytes:.2f} GB"

    def place(self, memory: torch.Tensor, rank: int, part: LinearPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Where A [rank, in] and B [out, rank] of a part are in the memory of one slot with this rank."""
        place = part.kind, part.index
        a, b = self._linears[place].matrices.of(memory, rank)
        return a[self._parts[place].index(part)], b[part.start : part.start + len(part.rows)]

    def fill(self, slot: int, pieces: Iterable[torch.Tensor]) -> None:
        """Copy an adapter of host memory [rank * size] into a slot. The copy may be under way on return."""
        start, memory = 0, self.memory[slot]
        for piece in pieces:
            memory[start : start + len(piece)].copy_(piece, non_blocking=True)
            start += len(piece)
        self.ranks[slot].fill_(start // self.size)

    @torch.inference_mode()
    def run_all_kernels(self) -> None:
        """Compile what steps need. The slots must be empty."""
        tiles = torch.tensor([[0, 0, 1]], dtype=torch.int32, device=self.memory.device)
        for num_rows in (1, FEW, FEW + 1):
            self.rows = AdapterRows(tiles[0], tiles, tile_rows(num_rows))
            for (_, index), linear in self._linears.items():
                if not index:  # those of a kind have one shape
                    x = self.memory.new_zeros(num_rows, linear.matrices.num_inputs)
                    y = x.new_zeros(num_rows, linear.matrices.bounds[-1])
                    linear.run(x, y.contiguous, y)
                    if 2 * linear.matrices.bounds[1] == linear.matrices.bounds[-1]:
                        linear.run(x, y.contiguous, is_gated=True)
        self.rows = None
